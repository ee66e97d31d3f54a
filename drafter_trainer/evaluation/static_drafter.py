"""A drafter whose context has a fixed size, for several rows at once.

A block's own keys and values are kept in the context at the positions that they draft, until the features of the
tokens that are really there take their place.

Shapes: N rows, B block size, L tokens, S tokens of context, D hidden size, n features, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional

from drafter_trainer.drafter import DFlashDrafter
from drafter_trainer.evaluation.static_attention import StaticCache, additive, attend, key_distance


class StaticDrafter:
    """A drafter with its context.

    Args:
        drafter: evaluation mode, on the target's device and in its dtype.
        embedding: the target's embedding weight [V, D].
        head: the target's head weight [V, D].
        max_length: tokens that a row can hold (S).
    """

    def __init__(self, drafter: DFlashDrafter, embedding: Tensor, head: Tensor, max_length: int) -> None:
        self.drafter, self.embedding, self.head = drafter, embedding, head
        self.context = StaticCache(max_length)
        self._slots = torch.arange(drafter.config.block_size, device=head.device)

    @property
    def block_size(self) -> int:
        """Tokens that a round verifies (B)."""
        return self.drafter.config.block_size

    def extend(self, features: Tensor, positions: Tensor) -> None:
        """Put features [N, L, n·D] of tokens at positions int [N, L] into the context."""
        rows, length = positions.shape
        projected = self.drafter.project_context(features.flatten(0, 1), positions.flatten())
        for layer, (key, value) in enumerate(projected):
            self.context.write(layer, _by_row(key, rows, length), _by_row(value, rows, length), positions)

    def propose(self, last: Tensor, positions: Tensor) -> Tensor:
        """Logits [N, B - 1, V] of the tokens behind the last accepted one.

        Args:
            last: int [N].
            positions: int [N, B], of the last token and the drafts.
        """
        config = self.drafter.config
        block = torch.where(self._slots == 0, last[:, None], config.mask_token_id)
        embedded = functional.embedding(block, self.embedding) * config.embedding_scale
        # The context proper is kept by the attention; the layers see an empty one.
        empty = self.head.new_empty(config.num_key_value_heads, 0, config.head_dim)
        hidden = self.drafter.draft(
            embedded.flatten(0, 1),
            positions.flatten(),
            [(empty, empty)] * config.num_layers,
            _BlockAttention(self.context, positions, config.sliding_window),
        )
        logits = functional.linear(hidden.unflatten(0, block.shape)[:, 1:], self.head)
        cap = config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


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
