"""⑨ Targets of the slots and the mask's tiles, all at once, from a pack and its anchors.

Two dozen small tensor operations on integers: on a GPU they are compiled into a few kernels, once per pack length.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from drafter_trainer.anchors import Anchors, BlockTargets, build_block_targets
from drafter_trainer.block_mask import (
    AttentionLayout,
    BlockAttention,
    MaskTensors,
    build_block_attention,
    flex_attention_of,
    mask_tensors,
)

ROW_NAMES = ("input_ids", "loss_mask", "document_ids", "position_ids")
"""What the layout reads of a pack: int or uint8 [T] each."""


class LaidOut(NamedTuple):
    """Tensors only, so that a compiled function can return it; `masks`: full and sliding, for flex."""

    targets: BlockTargets
    masks: tuple[MaskTensors | None, MaskTensors | None]


class PackLayout:
    """Lays out packs of a drafter; no host sync."""

    def __init__(self, attention: AttentionLayout, block_size: int, mask_token_id: int) -> None:
        self._attention = attention
        self._block_size = block_size
        self._mask_token_id = mask_token_id

    def __call__(self, rows: Mapping[str, Tensor], anchors: Anchors) -> LaidOut:
        """Plain tensor code, fit to be compiled. `rows`: at least `ROW_NAMES`."""
        targets = build_block_targets(rows, anchors, block_size=self._block_size, mask_token_id=self._mask_token_id)
        if self._attention.kind != "flex":
            return LaidOut(targets, (None, None))
        return LaidOut(targets, mask_tensors(self._attention, anchors, rows["position_ids"]))

    def attention(self, laid_out: LaidOut, rows: Mapping[str, Tensor], anchors: Anchors) -> BlockAttention:
        """What the drafter's layers call. For flex it launches nothing."""
        positions = rows["position_ids"]
        if self._attention.kind != "flex":
            return build_block_attention(self._attention, anchors, positions)
        return flex_attention_of(laid_out.masks, positions.numel(), laid_out.targets.labels.numel(), anchors)
