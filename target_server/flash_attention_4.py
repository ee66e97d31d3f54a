"""Attention over all documents of a pack by flash-attn 4, an optional package for Hopper and newer GPUs.

On an H200 its kernel takes half the time of the flash attention 2 that comes with torch (docs/experiments/LOG.md). It
is a beta that compiles its kernels at run time: it is used once it has computed what torch's does.
"""

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.telemetry.logs import log_event
from target_server.attention import AttentionTraits, Kernel, PackedDocuments

FLASH_4 = "one variable-length flash attention 4 call per layer"

_HEAD_DIM = 128
"""The size that was measured; smaller heads are those of small targets, which are not bound by attention."""
_OLDEST = (9, 0)
_TRIED_LENGTHS = (5, 300, 207)
_TRIED_HEADS = ((8, 8), (8, 2), (7, 1))
"""Of queries and of keys: kernels differ with how many of the former share one of the latter."""
_ROUNDING = 0.01

_log = logging.getLogger(__name__)


def flash_4_kernel(
    traits: Sequence[AttentionTraits], device: torch.device, dtype: torch.dtype, other: Kernel
) -> Kernel | None:
    """The kernel where the package is installed, the layers suit it, and it agrees with `other` on random documents.

    Args:
        traits: of all layers.
        device: a CUDA device.
        dtype: of queries, keys and values, bfloat16 or float16.
        other: torch's own kernel, right and slower.
    """
    if torch.cuda.get_device_capability(device) < _OLDEST or any(layer.query_dim != _HEAD_DIM for layer in traits):
        return None
    try:
        if not _is_installed():
            return None
        kernel = _make_kernel()
        differing = [layer for layer in dict.fromkeys(traits) if not _agree(kernel, other, layer, device, dtype)]
    except Exception as error:  # noqa: BLE001 - whatever a beta raises, torch's kernel is there
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    else:
        if not differing:
            return kernel
        why = f"it computes something else for {differing[0]}"
    log_event(_log, "warning", "flash_attention_4_not_used", why=why, effect="flash attention 2, half as fast")
    return None


def _is_installed() -> bool:
    """Imports the package around it, which is flash-attn 2's where that is installed too, with errors of its own."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


def _make_kernel() -> Kernel:
    from flash_attn.cute.interface import flash_attn_varlen_func  # type: ignore[import-not-found]

    attend: Any = flash_attn_varlen_func

    def all_documents(
        query: Tensor, key: Tensor, value: Tensor, traits: AttentionTraits, documents: PackedDocuments
    ) -> Tensor:
        # Keys to the left of the query besides itself, and to its right; without a window `causal` says it all.
        window = (None, None) if traits.window is None else (traits.window - 1, 0)
        found = attend(
            *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
            cu_seqlens_q=documents.cumulative_lengths,
            cu_seqlens_k=documents.cumulative_lengths,
            max_seqlen_q=documents.max_length,
            max_seqlen_k=documents.max_length,
            softmax_scale=traits.scale,
            causal=traits.window is None,
            window_size=window,
        )
        row: Tensor = found[0] if isinstance(found, tuple) else found
        return row[None]

    return all_documents


def _agree(kernel: Kernel, other: Kernel, traits: AttentionTraits, device: torch.device, dtype: torch.dtype) -> bool:
    """But for rounding, on a few documents."""
    generator = torch.Generator(device).manual_seed(0)
    documents = PackedDocuments(_TRIED_LENGTHS, device, other)

    def draw(heads: int) -> Tensor:
        shape = (1, sum(_TRIED_LENGTHS), heads, traits.query_dim)
        return torch.randn(shape, device=device, dtype=dtype, generator=generator).transpose(1, 2)

    def is_near(heads: int, kv_heads: int) -> bool:
        inputs = draw(heads), draw(kv_heads), draw(kv_heads)
        with torch.no_grad():
            ours, theirs = (one(*inputs, traits, documents).float() for one in (kernel, other))
        return bool((ours - theirs).abs().mean() <= _ROUNDING * theirs.abs().mean())

    return all(is_near(heads, kv_heads) for heads, kv_heads in _TRIED_HEADS)
