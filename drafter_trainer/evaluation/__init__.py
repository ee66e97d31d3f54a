"""Speculative decoding of real prompts: what the target accepts, how fast, and whether losslessly."""
