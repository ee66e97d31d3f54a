"""Attention over caches of fixed size, in which every row of a batch has a length of its own.

A token's key and value go to the index of its position, and a mask hides what lies behind a row's length. Therefore
nothing is ever removed: a rejected draft is hidden by its position and overwritten by the token that takes its place.
Shapes do not change from round to round, so that a round can be captured as a CUDA graph.

Shapes: N rows, L new tokens a row, S cached tokens, H query heads, K key/value heads, d head size.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from slipstream.target_files import model_error

ATTENTION_NAME = "slipstream_static"
"""transformers makes no mask for a name that it does not know."""
STEP_ARGUMENT = "static_step"
"""Keyword of the model's forward that carries the `CachedStep` to every layer."""
LAYER_ARGUMENT = "static_layer"
"""Keyword of a layer's forward: its own keys and values. One compiled layer then serves all, whatever its number."""

_UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "sinks")


@dataclass
class StaticCache:
    """Keys and values [N, K, S, d] of every layer, made when a layer writes for the first time."""

    length: int
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    mask_kinds: set["MaskKind"] = field(default_factory=set)
    """What layers have asked `CachedStep.causal_mask` for."""

    def write(self, layer: int, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Put key and value [N, K, L, d] of tokens at positions int [N, L] → the layer's whole [N, K, S, d] each."""
        if layer not in self.layers:
            # Zeros: what a mask hides is still multiplied, and memory as it comes may hold NaN.
            self.layers[layer] = self._zeros(key), self._zeros(value)
        return write_into(self.layers[layer], key, value, positions)

    def _zeros(self, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape[0], like.shape[1], self.length, like.shape[3])


def write_into(cached: tuple[Tensor, Tensor], key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Put key and value [N, K, L, d] of tokens at positions int [N, L] into a layer's [N, K, S, d] each."""
    for whole, new in zip(cached, (key, value), strict=True):
        whole.scatter_(2, positions[:, None, :, None].expand_as(new), new)
    return cached


MaskKind = tuple[int | None, int, torch.dtype]
"""Window, query heads a key head, dtype of the scores."""


@dataclass
class CachedStep:
    """New tokens of every row and what they may see. Travels with one forward, owned by it."""

    cache: StaticCache
    positions: Tensor
    """int64 [N, L]"""
    _masks: dict[MaskKind, Tensor] = field(default_factory=dict)

    def causal_mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """See `additive`; shared by the layers of a forward."""
        key = (window, groups, dtype)
        if key not in self._masks:
            self.cache.mask_kinds.add(key)
            distance = key_distance(self.positions, self.cache.length)
            seen = distance >= 0
            self._masks[key] = additive(seen if window is None else seen & (distance < window), groups, dtype)
        return self._masks[key]


def key_distance(positions: Tensor, length: int) -> Tensor:
    """How far every cached token lies behind tokens at positions int [N, L] → int64 [N, L, S]."""
    return positions[..., None] - torch.arange(length, device=positions.device)


def additive(seen: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """A mask to add to scores, [N, 1, groups · L, S], of what is seen, bool [N, L, S]: 0 or minus infinity."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf"))
    return mask.repeat(1, groups, 1)[:, None]


def attend(
    query: Tensor,
    cached: tuple[Tensor, Tensor],
    mask: Tensor,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of query [N, H, L, d] to keys and values [N, K, S, d] → [N, H, L, d]; mask as `additive` makes it.

    float32 takes plain products: fused kernels may round float32 to fewer bits, and float32 is what proves
    losslessness. Fused kernels do not know caps on scores either.
    """
    keys, values = cached
    rows, heads, length, head_dim = query.shape
    groups = heads // keys.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    # Query heads that share a key head become further queries of it: no copy of the keys, and every kernel takes it.
    query = query.reshape(rows, keys.shape[1], groups * length, head_dim)
    if query.dtype == torch.float32 or soft_cap is not None:
        attended = _by_products(query, keys, values, mask, scale, soft_cap)
    else:
        attended = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    return attended.reshape(rows, heads, length, values.shape[-1])


def _by_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, soft_cap: float | None
) -> Tensor:
    scores = query @ keys.transpose(2, 3) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = (scores.float() + mask).softmax(dim=-1)
    return weights.to(query.dtype) @ values


def static_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer: query [N, H, L, d] → [N, L, H, d].

    Raises:
        SlipstreamError: MODEL_INVALID, the layer asks for something that is not implemented here.
    """
    step: CachedStep | None = arguments.get(STEP_ARGUMENT)
    unsupported = [name for name in _UNSUPPORTED_ARGUMENTS if arguments.get(name) is not None]
    if step is None:
        unsupported.append("no way to pass the cache through")
    if attention_mask is not None:
        unsupported.append("a mask of its own")
    if not getattr(module, "is_causal", True):
        unsupported.append("attention to later tokens")
    if unsupported or step is None:
        raise model_error(
            f"{type(module).__name__} cannot decode with a cache of fixed size: it uses {', '.join(unsupported)}.",
            "Use a target of another architecture.",
        )
    layer: tuple[Tensor, Tensor] | None = arguments.get(LAYER_ARGUMENT)
    if layer is None:
        cached = step.cache.write(int(module.layer_idx), key, value, step.positions)  # type: ignore[arg-type]
    else:
        cached = write_into(layer, key, value, step.positions)
    mask = step.causal_mask(arguments.get("sliding_window"), query.shape[1] // key.shape[1], query.dtype)
    attended = attend(query, cached, mask, arguments.get("scaling"), arguments.get("softcap"))
    return attended.transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, static_attention)
