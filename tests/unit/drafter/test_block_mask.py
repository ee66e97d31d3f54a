"""One mask as element function, closed-form BlockMask and dense tensor, all against a walk over rows and slots."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from drafter_trainer.anchors import Anchors, draw_anchors
from drafter_trainer.block_mask import (
    TILE,
    AttentionLayout,
    MaskTensors,
    SdpaAttention,
    VisibleIntervals,
    build_block_attention,
    flex_mask,
    list_tiles,
    make_mask_mod,
    materialise_mask,
    round_up,
    visible_intervals,
)
from tests.fakes.dense_reference import visible_rows, visible_slots
from tests.fakes.drafter_cases import anchor_list, as_lists, packed, random_lengths

WINDOWS = [None, 1, 5, 40, 200]


def mask_by_walking(pack: dict, anchors: Anchors, block_size: int, window: int | None) -> Tensor:
    lists, length = as_lists(pack), len(pack["input_ids"])
    queries = len(anchors.valid) * block_size
    mask = torch.zeros(queries, length + queries, dtype=torch.bool)
    for i, anchor in enumerate(anchor_list(anchors)):
        if anchor is None:
            continue
        for slot in range(block_size):
            row = i * block_size + slot
            mask[row, visible_rows(lists, anchor, slot, window)] = True
            for other in visible_slots(slot, block_size, window):
                mask[row, length + i * block_size + other] = True
    return mask


def random_case(seed: int, pack_tokens: int, num_anchors: int) -> tuple[dict, Anchors]:
    generator = torch.Generator().manual_seed(seed)
    pack = packed(random_lengths(pack_tokens, generator), pack_tokens, seed=seed)
    return pack, draw_anchors(pack["loss_mask"], pack["document_ids"], num_anchors, seed, 0)


@pytest.mark.parametrize("block_size", [7, 8, 10, 16])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_the_mask_is_what_walking_the_pack_sees(block_size: int, window: int | None) -> None:
    for seed in range(2):
        pack, anchors = random_case(seed, 50, 48 if seed else 6)
        visible = visible_intervals(anchors, pack["position_ids"], block_size, window)
        dense = materialise_mask(visible, 50, len(anchors.valid) * block_size)
        assert torch.equal(dense, mask_by_walking(pack, anchors, block_size, window))


def build_flex_mask(visible: VisibleIntervals, context_length: int, num_queries: int) -> BlockMask:
    tiles = list_tiles(visible, context_length, num_queries)
    return flex_mask(MaskTensors(visible, tiles), context_length, num_queries)


def tile_sets(counts: Tensor, indices: Tensor) -> list[set[int]]:
    return [set(row[:count].tolist()) for count, row in zip(counts[0, 0], indices[0, 0], strict=True)]


def assert_tiles_cover(ours: BlockMask, evaluated: BlockMask) -> None:
    """Every tile with a visible key is listed once; only tiles that are full are called full."""
    our_partial = tile_sets(ours.kv_num_blocks, ours.kv_indices)
    our_full = tile_sets(ours.full_kv_num_blocks, ours.full_kv_indices)
    true_partial = tile_sets(evaluated.kv_num_blocks, evaluated.kv_indices)
    true_full = tile_sets(evaluated.full_kv_num_blocks, evaluated.full_kv_indices)
    for partial, full, expected_partial, expected_full in zip(
        our_partial, our_full, true_partial, true_full, strict=True
    ):
        assert not partial & full
        assert full <= expected_full
        assert partial | full >= expected_partial | expected_full


# (pack tokens, anchors, block size), with lengths on and off the tile.
CASES = [(512, 40, 16), (384, 37, 7), (640, 64, 10), (200, 30, 8), (129, 5, 16), (128, 1, 7)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_closed_form_equals_create_block_mask(case: tuple[int, int, int], window: int | None) -> None:
    pack_tokens, num_anchors, block_size = case
    for seed in range(3):
        pack, anchors = random_case(seed, pack_tokens, num_anchors)
        visible = visible_intervals(anchors, pack["position_ids"], block_size, window)
        num_queries = num_anchors * block_size
        ours = build_flex_mask(visible, pack_tokens, num_queries)
        q_len, kv_len = ours.seq_lengths
        assert (q_len, kv_len) == (round_up(num_queries), round_up(pack_tokens + num_queries))
        mask_mod = make_mask_mod(visible, pack_tokens)
        evaluated = create_block_mask(mask_mod, 1, 1, q_len, kv_len, device="cpu", BLOCK_SIZE=TILE)
        assert_tiles_cover(ours, evaluated)
        # The lists by key tile, which the backward walks, say the same as those by query tile.
        by_query = BlockMask.from_kv_blocks(
            ours.kv_num_blocks,
            ours.kv_indices,
            ours.full_kv_num_blocks,
            ours.full_kv_indices,
            seq_lengths=(q_len, kv_len),
        )
        assert torch.equal(ours.q_num_blocks, by_query.q_num_blocks)
        assert torch.equal(ours.q_indices, by_query.q_indices)
        assert torch.equal(ours.full_q_num_blocks, by_query.full_q_num_blocks)
        assert torch.equal(ours.full_q_indices, by_query.full_q_indices)
        for indices in (ours.kv_indices, ours.full_kv_indices, ours.q_indices, ours.full_q_indices):
            assert indices is not None and indices.dtype == torch.int32 and indices.is_contiguous()
        assert ours.kv_indices.max() < kv_len // TILE and ours.q_indices.max() < q_len // TILE
        # The list is exact where context and blocks share no tile: no work on tiles without a visible key.
        if pack_tokens % TILE == 0:
            assert torch.equal(ours.to_dense(), evaluated.to_dense())
            assert torch.equal(ours.full_kv_num_blocks, evaluated.full_kv_num_blocks)


def test_full_tiles_exist_where_every_query_sees_them() -> None:
    positions = torch.arange(1024)
    anchors = Anchors(torch.arange(900, 908), torch.ones(8, dtype=torch.bool))
    mask = build_flex_mask(visible_intervals(anchors, positions, 16), 1024, 128)
    assert tile_sets(mask.full_kv_num_blocks, mask.full_kv_indices) == [set(range(7))]
    assert tile_sets(mask.kv_num_blocks, mask.kv_indices) == [{7, 8}]


def test_no_valid_anchor_means_no_tile() -> None:
    anchors = Anchors(torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.bool))
    mask = build_flex_mask(visible_intervals(anchors, torch.arange(256), 16), 256, 128)
    assert mask.kv_num_blocks.sum() == 0 and mask.full_kv_num_blocks.sum() == 0


def test_the_mask_function_stays_in_range_beyond_its_queries() -> None:
    anchors = Anchors(torch.tensor([5]), torch.tensor([True]))
    mask_mod = make_mask_mod(visible_intervals(anchors, torch.arange(128), 7), 128)
    zero = torch.tensor(0)
    assert not mask_mod(zero, zero, torch.tensor(10_000), torch.arange(512)).any()


@pytest.mark.parametrize("sliding", [False, True])
def test_queries_of_invalid_anchors_give_zero_and_finite_gradients(sliding: bool) -> None:
    pack = packed([30], 32)
    anchors = Anchors(torch.tensor([9, 0]), torch.tensor([True, False]))
    layout = AttentionLayout("sdpa", 8, has_full=not sliding, has_sliding=sliding, window=3)
    attention = build_block_attention(layout, anchors, pack["position_ids"])
    assert isinstance(attention, SdpaAttention)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(h, n, 8, generator=generator).requires_grad_() for h, n in ((4, 16), (2, 48), (2, 48))]
    output = attention(*inputs, sliding=sliding)
    assert output[:, 8:].count_nonzero() == 0
    assert output[:, :8].count_nonzero() > 0
    for gradient in torch.autograd.grad(output.square().sum(), inputs):
        assert torch.isfinite(gradient).all()
    assert torch.autograd.grad(attention(*inputs, sliding=sliding)[:, 8:].sum(), inputs[0])[0].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_all_layers_share_one_mask_and_the_bits_are_those_of_the_boolean_one(dtype: torch.dtype) -> None:
    pack = packed([50, 30], 96)
    anchors = draw_anchors(pack["loss_mask"], pack["document_ids"], 12, 0, 0)
    layout = AttentionLayout("sdpa", 4, has_full=True, has_sliding=True, window=7)
    attention = build_block_attention(layout, anchors, pack["position_ids"])
    assert isinstance(attention, SdpaAttention)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(h, n, 8, generator=generator).to(dtype) for h, n in ((4, 48), (2, 144), (2, 144))]
    for mask, sliding in ((attention.full, False), (attention.sliding, True)):
        ours, plain = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
        kept: set[int] = set()

        def keep(tensor: Tensor, kept: set[int] = kept) -> Tensor:
            if tensor.shape == (48, 144):
                kept.add(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = [attention(*ours, sliding=sliding) for _ in range(3)]
        assert len(kept) == 1
        query, key, value = (tensor[None] for tensor in plain)
        expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)[0]
        expected = torch.where(attention.sees_something, expected, 0.0)
        assert torch.equal(outputs[-1], expected)
        gradients = [
            torch.autograd.grad(output.square().sum(), of) for output, of in ((outputs[-1], ours), (expected, plain))
        ]
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
