"""Attention within the documents of a packed row, through transformers' attention interface.

A row holds documents one after another. No mask of the row is ever made: either one variable-length kernel runs over
all documents (CUDA), or one SDPA call per document. Which of the two is decided once, when the model is loaded.

The documents do not travel through transformers' code: whoever runs a model calls it inside `PackedDocuments.in_use`.
A compiled layer calls attention as one opaque operator, so that other documents never mean another graph.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from slipstream.target_files import model_error

FLASH_2 = "one variable-length flash attention call per layer"
"""What `choose_kernel` says of torch's own kernel that takes any documents without the host's help."""
ONE_PER_DOCUMENT = "one SDPA call per document and layer"

ATTENTION_NAME = "slipstream_packed"
"""Name under which `packed_attention` is registered; transformers makes no mask for a name that it does not know."""

# Arguments that change the result of attention in ways not implemented here (attention sinks, relative positions).
_UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "sinks")
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class AttentionTraits:
    """What one layer asks of attention, as transformers passes it."""

    scale: float
    """Factor on the scores."""
    window: int | None
    """Keys that a query sees, itself included; None: all earlier ones."""
    soft_cap: float | None
    """tanh soft cap on the scores (Gemma 2)."""
    query_dim: int
    value_dim: int


Kernel = Callable[[Tensor, Tensor, Tensor, AttentionTraits, "PackedDocuments"], Tensor]
"""(query [1, H, T, d], key [1, K, T, d], value [1, K, T, e], traits, documents) -> [1, T, H, e]."""


class PackedDocuments:
    """Where the documents of one row begin and end, for one forward."""

    def __init__(self, lengths: Sequence[int], device: torch.device, kernel: Kernel) -> None:
        """`lengths`: tokens of each document, every one at least 1."""
        assert lengths and min(lengths) >= 1, "a row needs documents of at least one token"
        boundaries = (0, *accumulate(lengths))
        self.ranges = tuple(pairwise(boundaries))
        self.max_length = max(lengths)
        self.kernel = kernel
        self.cumulative_lengths = to_device(torch.tensor(boundaries, dtype=torch.int32), device)
        self.traits: dict[int, AttentionTraits] = {}
        """What each attention module asked for, by its id."""
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, traits: AttentionTraits) -> Tensor:
        """Attention of one layer: query `[1, H, T, d]` -> `[1, T, H, d]`."""
        return self.kernel(query, key, value, traits, self)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Attention in this thread is within these documents while the block runs."""
        before, _thread.documents = _thread.documents, self
        try:
            yield
        finally:
            _thread.documents = before

    def mask(self, length: int, window: int | None) -> Tensor:
        """Causal mask of one document, True = visible, bool `[length, length]`; shared by the layers of a forward."""
        key = (length, window)
        if key not in self._masks:
            mask = torch.ones(length, length, dtype=torch.bool, device=self.cumulative_lengths.device).tril_()
            self._masks[key] = mask if window is None else mask.triu_(1 - window)
        return self._masks[key]


class _Thread(threading.local):
    documents: PackedDocuments | None = None


_thread = _Thread()


def to_device(row: Tensor, device: torch.device) -> Tensor:
    """A copy on the device. Pinned on the way, or the host would wait for what the device is doing."""
    return row.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else row.to(device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer: query `[1, H, T, d]` -> `[1, T, H, d]`.

    Raises:
        SlipstreamError: MODEL_INVALID, when the layer asks for something that packed attention does not do.
    """
    unsupported = [name for name in _UNSUPPORTED_ARGUMENTS if arguments.get(name) is not None]
    if attention_mask is not None:
        unsupported.append("a mask of its own")
    if not getattr(module, "is_causal", True):
        unsupported.append("attention to later tokens")
    if unsupported:
        raise model_error(
            f"{type(module).__name__} cannot run on packed documents: it uses {', '.join(unsupported)}.",
            "Use a target of another architecture.",
        )
    scale = arguments.get("scaling")
    asked = (
        query.shape[-1] ** -0.5 if scale is None else scale,
        arguments.get("sliding_window"),
        arguments.get("softcap"),
    )
    if torch.compiler.is_compiling():
        return torch.ops.slipstream.packed_attention(query, key, value, *asked), None
    traits = AttentionTraits(*asked, query.shape[-1], value.shape[-1])
    _documents().traits[id(module)] = traits
    return _documents().attend(query, key, value, traits), None


def _attend_as_operator(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, soft_cap: float | None
) -> Tensor:
    traits = AttentionTraits(scale, window, soft_cap, query.shape[-1], value.shape[-1])
    return _documents().attend(query, key, value, traits).contiguous()


def _shape_of_attention(
    query: Tensor, _key: Tensor, value: Tensor, _scale: float, _window: int | None, _soft_cap: float | None
) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


def _documents() -> PackedDocuments:
    assert _thread.documents is not None, "a model with packed attention runs inside PackedDocuments.in_use"
    return _thread.documents


torch.library.define(
    "slipstream::packed_attention",
    "(Tensor query, Tensor key, Tensor value, float scale, int? window, float? soft_cap) -> Tensor",
)
torch.library.impl("slipstream::packed_attention", ("cpu", "cuda"), _attend_as_operator)
torch.library.register_fake("slipstream::packed_attention", _shape_of_attention)
AttentionInterface.register(ATTENTION_NAME, packed_attention)


def per_document(
    query: Tensor, key: Tensor, value: Tensor, traits: AttentionTraits, documents: PackedDocuments
) -> Tensor:
    """One call per document: SDPA, or plain matrix products where scores are soft-capped. Any device, any dtype."""
    attend = _sdpa if traits.soft_cap is None else _soft_capped
    row = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for start, end in documents.ranges:
        at = (slice(None), slice(None), slice(start, end))
        row[:, start:end] = attend(query[at], key[at], value[at], traits, documents).transpose(1, 2)
    return row


def _sdpa(query: Tensor, key: Tensor, value: Tensor, traits: AttentionTraits, documents: PackedDocuments) -> Tensor:
    length = query.shape[2]
    windowed = traits.window is not None and traits.window < length
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=documents.mask(length, traits.window) if windowed else None,
        is_causal=not windowed,
        scale=traits.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _soft_capped(
    query: Tensor, key: Tensor, value: Tensor, traits: AttentionTraits, documents: PackedDocuments
) -> Tensor:
    assert traits.soft_cap is not None
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = traits.soft_cap * torch.tanh(query @ key.transpose(2, 3) * traits.scale / traits.soft_cap)
    scores = scores.float().masked_fill(~documents.mask(length, traits.window), float("-inf"))
    return scores.softmax(dim=-1).to(query.dtype) @ value


def make_varlen_kernel() -> Kernel:
    """Flash attention over all documents in one call (`torch.nn.attention.varlen`, torch ≥ 2.11, CUDA).

    The signature differs between versions of torch: windows and grouped heads are passed as the installed one wants.
    """
    from torch.nn.attention import varlen

    attend: Any = varlen.varlen_attn
    grouping = {"enable_gqa": True} if "enable_gqa" in inspect.signature(attend).parameters else {}

    def all_documents(
        query: Tensor, key: Tensor, value: Tensor, traits: AttentionTraits, documents: PackedDocuments
    ) -> Tensor:
        # (left, right): keys to the left of the query besides itself; -1 is all, 0 to the right is causal.
        left = -1 if traits.window is None else traits.window - 1
        row: Tensor = attend(
            *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
            documents.cumulative_lengths,
            documents.cumulative_lengths,
            documents.max_length,
            documents.max_length,
            scale=traits.scale,
            window_size=(left, 0),
            **grouping,
        )
        return row[None]

    return all_documents


def choose_kernel(traits: Sequence[AttentionTraits], device: torch.device, dtype: torch.dtype) -> tuple[Kernel, str]:
    """The kernel for a model whose layers ask for `traits`, and one line that says which and why."""
    obstacle = _varlen_obstacle(traits, device, dtype)
    if obstacle is None:
        # Here, because it builds on what this module defines.
        from target_server.flash_attention_4 import FLASH_4, flash_4_kernel

        varlen = make_varlen_kernel()
        newer = flash_4_kernel(traits, device, dtype, varlen)
        return (varlen, FLASH_2) if newer is None else (newer, FLASH_4)
    return per_document, f"{ONE_PER_DOCUMENT}, because {obstacle}"


def _varlen_obstacle(traits: Sequence[AttentionTraits], device: torch.device, dtype: torch.dtype) -> str | None:
    """Why variable-length flash attention cannot serve this model here; None if it can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than flash attention supports"
    if dtype not in _FLASH_DTYPES:
        return f"flash attention does not take {dtype}"
    if any(layer.soft_cap is not None for layer in traits):
        return "its attention scores are soft-capped"
    odd = [layer for layer in traits if layer.query_dim != layer.value_dim or layer.query_dim % 8]
    if odd or max(layer.query_dim for layer in traits) > _FLASH_MAX_HEAD_DIM:
        return "flash attention does not take its head sizes"
    if "window_size" not in _varlen_parameters():
        return f"torch {torch.__version__} has no variable-length attention with causal windows"
    return None


def _varlen_parameters() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)
