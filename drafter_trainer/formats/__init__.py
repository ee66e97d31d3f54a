"""Drafters in the formats that others read: vLLM (speculators), SGLang, z-lab's for transformers."""
