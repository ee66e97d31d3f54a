"""⑨ Which keys a block's queries see, for flex_attention and for SDPA from one mask_mod.

Queries: the A·B block slots. Keys: the T context tokens, then the A·B block slots. A query of anchor a sees context
tokens before a of its own document, and its own block; with a sliding window of W it sees only keys at most W - 1
positions back and none ahead. Documents are contiguous in a pack, so what a query sees is two intervals, one of context
and one of block keys: four integers per query say everything, for the element mask and for the tile mask alike.

Shapes: T context tokens, A anchors, B block size, Q = A·B rounded up to 128, K = T + A·B rounded up to 128.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from drafter_trainer.anchors import Anchors

TILE = 128
"""Edge of a flex tile, never changed: torch drops backward configurations whose tiles do not divide it."""

_ROWS_AT_ONCE = 512

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class VisibleIntervals(NamedTuple):
    """Half-open key intervals per query, int32 [Q]; empty for queries of invalid anchors and for padding.

    `context_*` are pack rows; `block_*` are query numbers, so the key of query i in the block part is T + i.
    """

    context_start: Tensor
    context_end: Tensor
    block_start: Tensor
    block_end: Tensor


class TileLists(NamedTuple):
    """Tiles that hold something visible, int32, by query tile (`kv_*`) and by key tile (`q_*`). `count` [1, 1, N] and
    `index` [1, 1, N, M]: the first `count` entries of a row count, the others are valid tile numbers all the same.

    `full_*`: every query of the tile sees every key of it; these are not among the others.
    """

    kv_count: Tensor
    kv_index: Tensor
    full_kv_count: Tensor
    full_kv_index: Tensor
    q_count: Tensor
    q_index: Tensor
    full_q_count: Tensor
    full_q_index: Tensor


class MaskTensors(NamedTuple):
    """All of one flex mask that depends on the pack."""

    visible: VisibleIntervals
    tiles: TileLists


def round_up(length: int, multiple: int = TILE) -> int:
    """The smallest multiple that is not below `length`."""
    return -(-length // multiple) * multiple


def visible_intervals(
    anchors: Anchors, position_ids: Tensor, block_size: int, window: int | None = None
) -> VisibleIntervals:
    """What each block slot sees.

    Args:
        anchors: [A], on the device of `position_ids`.
        position_ids: int [T]; restart at 0 with every document.
        block_size: B.
        window: W of a sliding layer; None: full attention.
    """
    positions = anchors.positions
    slots = torch.arange(block_size, device=positions.device)
    anchor = positions[:, None].expand(-1, block_size)
    first = (positions - position_ids.long()[positions])[:, None].expand(-1, block_size)
    block_start = (torch.arange(positions.numel(), device=positions.device) * block_size)[:, None].expand_as(anchor)
    block_end = block_start + block_size
    if window is not None:
        first = torch.maximum(first, anchor + slots - (window - 1))
        block_end = block_start + slots + 1
        block_start = torch.maximum(block_start, block_end - window)
    padding = round_up(anchor.numel()) - anchor.numel()

    def per_query(bound: Tensor) -> Tensor:
        visible = torch.where(anchors.valid[:, None], bound, 0)
        return functional.pad(visible.reshape(-1), (0, padding)).to(torch.int32)

    return VisibleIntervals(per_query(first), per_query(anchor), per_query(block_start), per_query(block_end))


def make_mask_mod(visible: VisibleIntervals, context_length: int) -> MaskMod:
    """The one mask function: fixed-length captures, so that new anchors never cost a graph."""
    context_start, context_end = visible.context_start, visible.context_end
    block_start, block_end = visible.block_start, visible.block_end
    last_query = context_start.numel() - 1

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # A kernel may probe rows past the end: an unchecked index would be an illegal memory access.
        row = query.clamp(max=last_query)
        in_context = (key >= context_start[row]) & (key < context_end[row])
        block_key = key - context_length
        in_block = (block_key >= block_start[row]) & (block_key < block_end[row])
        return in_context | in_block

    return mask_mod


def list_tiles(visible: VisibleIntervals, context_length: int, num_queries: int) -> TileLists:
    """The tiles in closed form from the intervals, without evaluating Q x K: plain tensor code, no host sync.

    Exactly the tiles that hold a visible key are listed, and a tile is full exactly if every one of its queries sees
    every one of its keys within one interval. The largest intermediate is bool [Q, K/128], which a compiler fuses away.

    Args:
        visible: [Q].
        context_length: T.
        num_queries: A·B before rounding.
    """
    key_length = round_up(context_length + num_queries)
    tile_start = torch.arange(0, key_length, TILE, device=visible.context_start.device)
    touched_context, full_context = _tiles(visible.context_start, visible.context_end, tile_start)
    touched_block, full_block = _tiles(visible.block_start, visible.block_end, tile_start - context_length)
    full = full_context | full_block
    partial = (touched_context | touched_block) & ~full
    return TileLists(*_ordered(partial), *_ordered(full), *_ordered(partial.t()), *_ordered(full.t()))


def flex_mask(mask: MaskTensors, context_length: int, num_queries: int) -> BlockMask:
    """What flex_attention takes; launches nothing."""
    visible, tiles = mask
    return BlockMask(
        seq_lengths=(round_up(num_queries), round_up(context_length + num_queries)),
        kv_num_blocks=tiles.kv_count,
        kv_indices=tiles.kv_index,
        full_kv_num_blocks=tiles.full_kv_count,
        full_kv_indices=tiles.full_kv_index,
        q_num_blocks=tiles.q_count,
        q_indices=tiles.q_index,
        full_q_num_blocks=tiles.full_q_count,
        full_q_indices=tiles.full_q_index,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=make_mask_mod(visible, context_length),
    )


def _tiles(start: Tensor, end: Tensor, tile_start: Tensor) -> tuple[Tensor, Tensor]:
    """(touched, full), bool [Q/128, K/128]: does any query's interval meet the tile; do all contain it."""
    first, last = tile_start, tile_start + TILE
    touches = (torch.maximum(start[:, None], first) < torch.minimum(end[:, None], last)).view(-1, TILE, first.numel())
    latest_start = start.view(-1, TILE).amax(dim=1, keepdim=True)
    earliest_end = end.view(-1, TILE).amin(dim=1, keepdim=True)
    return touches.any(dim=1), (latest_start <= first) & (last <= earliest_end)


def _ordered(present: Tensor) -> tuple[Tensor, Tensor]:
    """bool [N, M] → counts [1, 1, N] and indices [1, 1, N, M]: present tiles first, ascending, then the absent ones."""
    number = torch.arange(present.shape[1], device=present.device)
    tile = number.expand_as(present)
    # A product with a triangle of ones, exact in float32, instead of a prefix sum: torch 2.11 cannot compile one over
    # as many tiles as a long pack has.
    up_to = (number[:, None] <= number).to(torch.float32)
    seen = (present.to(torch.float32) @ up_to).to(torch.int64)
    count = seen[:, -1:]
    place = torch.where(present, seen - 1, count + tile - seen)
    # Contiguous also where `present` is transposed: kernels step through a row's entries one by one.
    index = torch.zeros(place.shape, dtype=place.dtype, device=place.device).scatter(1, place, tile)
    return count[None, None, :, 0].to(torch.int32), index[None, None].to(torch.int32)


def materialise_mask(visible: VisibleIntervals, context_length: int, num_queries: int) -> Tensor:
    """The same mask_mod evaluated densely: bool [A·B, T + A·B], for SDPA and for tests.

    Some rows at a time, because its intermediates are as large as what it returns.
    """
    device = visible.context_start.device
    keys = torch.arange(context_length + num_queries, device=device)[None, :]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    mask_mod = make_mask_mod(visible, context_length)
    mask = torch.empty(num_queries, keys.numel(), dtype=torch.bool, device=device)
    rows = torch.arange(num_queries, device=device)[:, None].split(_ROWS_AT_ONCE)
    for part, queries in zip(mask.split(_ROWS_AT_ONCE), rows, strict=True):
        part.copy_(mask_mod(zero, zero, queries, keys))
    return mask


@dataclass(frozen=True)
class FlexAttention:
    """Block attention by compiled flex_attention. Calling it outside a compiled function is an error."""

    full: BlockMask | None
    sliding: BlockMask | None
    anchors: Anchors
    """Of the blocks, for drafters that look something up there."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sliding: bool) -> Tensor:
        """query [Hq, A·B, d], key and value [Hkv, T + A·B, d] → [Hq, A·B, d]; queries that see nothing give 0."""
        mask = self.sliding if sliding else self.full
        assert mask is not None
        query_length, key_length = mask.seq_lengths
        output = flex_attention(
            _padded(query, query_length),
            _padded(key, key_length),
            _padded(value, key_length),
            block_mask=mask,
            enable_gqa=True,
        )
        assert isinstance(output, Tensor)
        return output[0, :, : query.shape[1]]


def _padded(heads: Tensor, length: int) -> Tensor:
    """[H, S, d] → [1, H, length, d], zeros at the end."""
    missing = length - heads.shape[1]
    # Padding by nothing is an operation all the same, whose result a backward would keep.
    return functional.pad(heads[None], (0, 0, 0, missing)) if missing else heads[None]


@dataclass(frozen=True)
class SdpaAttention:
    """Block attention by SDPA with masks from `materialise_mask`: for CPU and as a reference. Masks: bool [Q, K]."""

    full: Tensor | None
    sliding: Tensor | None
    sees_something: Tensor
    """Queries of valid anchors, bool [A·B, 1]. Softmax over no key is 0/0 in some kernels, so the masks let the other
    queries see everything, and their result is dropped here."""
    anchors: Anchors
    """As of `FlexAttention`."""
    _numbers: dict[tuple[bool, torch.dtype], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sliding: bool) -> Tensor:
        """query [Hq, A·B, d], key and value [Hkv, T + A·B, d] → [Hq, A·B, d]; queries that see nothing give 0."""
        mask = self._added_to_scores(sliding, query) if query.device.type == "cpu" else self._visible(sliding)
        output = functional.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, enable_gqa=query.shape[0] != key.shape[0]
        )
        return torch.where(self.sees_something, output[0], 0.0)

    def _visible(self, sliding: bool) -> Tensor:
        mask = self.sliding if sliding else self.full
        assert mask is not None
        return mask

    def _added_to_scores(self, sliding: bool, query: Tensor) -> Tensor:
        """What SDPA makes of a mask on a CPU, once for all layers: it would make it anew in every layer, and the
        backward would keep every one of them, the only tensors there that grow with queries times keys."""
        kind = sliding, query.dtype
        if kind not in self._numbers:
            zero = torch.zeros((), dtype=query.dtype)
            self._numbers[kind] = torch.where(self._visible(sliding), zero, float("-inf"))
        return self._numbers[kind]


BlockAttention = FlexAttention | SdpaAttention


@dataclass(frozen=True)
class AttentionLayout:
    """What the masks of a drafter depend on besides the pack.

    `kind`: flex (compiled, CUDA) or sdpa. `has_full`, `has_sliding`: which masks its layers need. `window`: W.
    """

    kind: Literal["flex", "sdpa"]
    block_size: int
    has_full: bool = True
    has_sliding: bool = False
    window: int | None = None


def mask_tensors(
    layout: AttentionLayout, anchors: Anchors, position_ids: Tensor
) -> tuple[MaskTensors | None, MaskTensors | None]:
    """For flex: the (full, sliding) masks that the layers need. Plain tensor code, no host sync, fit to be compiled.

    Args:
        layout: see `AttentionLayout`.
        anchors: [A].
        position_ids: int [T].
    """
    context_length, num_queries = position_ids.numel(), anchors.positions.numel() * layout.block_size
    full, sliding = _visible_by_kind(layout, anchors, position_ids)
    return (
        None if full is None else MaskTensors(full, list_tiles(full, context_length, num_queries)),
        None if sliding is None else MaskTensors(sliding, list_tiles(sliding, context_length, num_queries)),
    )


def flex_attention_of(
    masks: tuple[MaskTensors | None, MaskTensors | None], context_length: int, num_queries: int, anchors: Anchors
) -> FlexAttention:
    """From what `mask_tensors` returned; launches nothing."""
    full, sliding = (None if mask is None else flex_mask(mask, context_length, num_queries) for mask in masks)
    return FlexAttention(full, sliding, anchors)


def build_block_attention(layout: AttentionLayout, anchors: Anchors, position_ids: Tensor) -> BlockAttention:
    """Masks for every kind of layer, on the device of its arguments, without a host sync.

    Args:
        layout: see `AttentionLayout`.
        anchors: [A].
        position_ids: int [T].
    """
    context_length, num_queries = position_ids.numel(), anchors.positions.numel() * layout.block_size
    if layout.kind == "flex":
        masks = mask_tensors(layout, anchors, position_ids)
        return flex_attention_of(masks, context_length, num_queries, anchors)
    sees_something = anchors.valid.repeat_interleave(layout.block_size)[:, None]
    full_mask, sliding_mask = (
        None if v is None else materialise_mask(v, context_length, num_queries).logical_or_(~sees_something)
        for v in _visible_by_kind(layout, anchors, position_ids)
    )
    return SdpaAttention(full_mask, sliding_mask, sees_something, anchors)


def _visible_by_kind(
    layout: AttentionLayout, anchors: Anchors, position_ids: Tensor
) -> tuple[VisibleIntervals | None, VisibleIntervals | None]:
    full = visible_intervals(anchors, position_ids, layout.block_size) if layout.has_full else None
    sliding = visible_intervals(anchors, position_ids, layout.block_size, layout.window) if layout.has_sliding else None
    return full, sliding
