"""What peers build on: transformers' Qwen3 configuration of a draft model."""

from typing import Any

import torch
from torch import nn

from benchmarks.peers.workload import ROPE_THETA, Size


def qwen3_config(size: Size, attention: str) -> Any:
    """A `transformers.Qwen3Config`; `attention`: name of the implementation that its layers look up."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        intermediate_size=size.intermediate,
        vocab_size=size.vocab,
        num_hidden_layers=size.layers,
        rms_norm_eps=1e-6,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        layer_types=["full_attention"] * size.layers,
        attention_bias=False,
        tie_word_embeddings=False,
    )
    config._attn_implementation = attention
    return config


def round_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone: `.to(dtype)` would round the rotary frequencies too, and change a peer's loss."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
