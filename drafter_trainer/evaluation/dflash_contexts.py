"""What DFlash keeps of the tokens so far: projected keys and values, in caches of fixed size or growing.

A block's own keys and values are kept in a fixed context at the positions that they draft, until the features of the
tokens that are really there take their place.

Shapes: N rows, B block size, L tokens, S tokens of context, D hidden size, n features, H heads, d head size.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafter_trainer.drafter_interface import DraftContext
from drafter_trainer.evaluation.static_attention import StaticCache, additive, attend, key_distance

if TYPE_CHECKING:
    from drafter_trainer.drafter import DFlashDrafter, LayerContext


class GrowingContext(DraftContext):
    """Of one row; blocks are not kept."""

    def __init__(self, drafter: "DFlashDrafter") -> None:
        self._drafter = drafter
        self._layers: list[LayerContext] = []

    def extend(self, features: Tensor, positions: Tensor) -> None:
        """Behind the tokens that are there: features [1, L, n·D], positions int [1, L]."""
        new = self._drafter.project_context(features[0], positions[0])
        if self._layers:
            new = [
                (torch.cat((k, k_new), dim=1), torch.cat((v, v_new), dim=1))
                for (k, v), (k_new, v_new) in zip(self._layers, new, strict=True)
            ]
        self._layers = new

    def hidden(self, embeddings: Tensor, positions: Tensor) -> Tensor:
        """[1, B, D] → [1, B, D]"""
        return self._drafter.draft(embeddings[0], positions[0], self._layers)[None]


class FixedContext(DraftContext):
    """Of any number of rows, hidden by a mask behind a row's end."""

    def __init__(self, drafter: "DFlashDrafter", max_length: int) -> None:
        self._drafter = drafter
        self._cache = StaticCache(max_length)

    def extend(self, features: Tensor, positions: Tensor) -> None:
        """Features [N, L, n·D] at positions int [N, L]."""
        rows, length = positions.shape
        projected = self._drafter.project_context(features.flatten(0, 1), positions.flatten())
        for layer, (key, value) in enumerate(projected):
            self._cache.write(layer, _by_row(key, rows, length), _by_row(value, rows, length), positions)

    def hidden(self, embeddings: Tensor, positions: Tensor) -> Tensor:
        """[N, B, D] → [N, B, D]"""
        config = self._drafter.config
        # The context proper is kept by the attention; the layers see an empty one.
        empty = embeddings.new_empty(config.num_key_value_heads, 0, config.head_dim)
        hidden = self._drafter.draft(
            embeddings.flatten(0, 1),
            positions.flatten(),
            [(empty, empty)] * config.num_layers,
            _BlockAttention(self._cache, positions, config.sliding_window),
        )
        return hidden.unflatten(0, positions.shape)


class _BlockAttention:
    """Attention of one block a row to the row's context and to itself; the layers call it in their order."""

    def __init__(self, context: StaticCache, positions: Tensor, window: int | None) -> None:
        self.context, self.positions, self.window = context, positions, window
        self._layer = 0
        self._masks: dict[bool, Tensor] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sliding: bool) -> Tensor:
        """query [H, N·B, d], key and value [K, N·B, d] → [H, N·B, d]."""
        rows, length = self.positions.shape
        query, key, value = (_by_row(states, rows, length) for states in (query, key, value))
        cached = self.context.write(self._layer, key, value, self.positions)
        self._layer += 1
        mask = self._mask(sliding, query.shape[1] // key.shape[1], query.dtype)
        return attend(query, cached, mask).transpose(0, 1).flatten(1, 2)

    def _mask(self, sliding: bool, groups: int, dtype: torch.dtype) -> Tensor:
        if sliding not in self._masks:
            distance = key_distance(self.positions, self.context.length)
            if sliding:
                assert self.window is not None
                seen = (distance >= 0) & (distance < self.window)
            else:
                # All of the block sees all of the block, which ends at its last position.
                seen = (distance[:, -1:] >= 0).expand_as(distance)
            self._masks[sliding] = additive(seen, groups, dtype)
        return self._masks[sliding]


def _by_row(states: Tensor, rows: int, length: int) -> Tensor:
    """[H, N·L, d] → [N, H, L, d]"""
    return states.unflatten(1, (rows, length)).transpose(0, 1)
