"""1024 blocks of 32 slots over 512 tokens of context: more queries per token than any run draws, at its real size.

32,768 queries and 33,280 keys: here the mask in slices, by SDPA and by the intervals themselves; on a GPU the kernels,
forward and backward, in tests/gpu/test_never_dense.py.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drafter_trainer.anchors import Anchors
from drafter_trainer.block_mask import TILE, list_tiles, make_mask_mod, visible_intervals

CONTEXT, ANCHORS, BLOCK, WIDTH = 512, 1024, 32, 16
QUERIES = ANCHORS * BLOCK
KEYS = CONTEXT + QUERIES


def anchors_of(valid: int) -> Anchors:
    numbers = torch.arange(ANCHORS)
    return Anchors(torch.where(numbers < valid, numbers * CONTEXT // ANCHORS, 0), numbers < valid)


def listed(count: Tensor, index: Tensor, tile: int) -> set[int]:
    return set(index[0, 0, tile, : int(count[0, 0, tile])].tolist())


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("valid", [ANCHORS, 1, 0])
def test_the_tiles_are_those_that_the_mask_has(valid: int, window: int | None) -> None:
    visible = visible_intervals(anchors_of(valid), torch.arange(CONTEXT), BLOCK, window)
    mask_mod, tiles = make_mask_mod(visible, CONTEXT), list_tiles(visible, CONTEXT, QUERIES)
    zero = torch.zeros((), dtype=torch.int64)
    for tile in (0, 1, 17, 100, 254, 255):
        queries = torch.arange(tile * TILE, (tile + 1) * TILE)[:, None]
        mask = mask_mod(zero, zero, queries, torch.arange(KEYS)[None, :]).view(TILE, -1, TILE)
        touched = set(mask.any(dim=2).any(dim=0).nonzero()[:, 0].tolist())
        full = set(mask.all(dim=2).all(dim=0).nonzero()[:, 0].tolist())
        assert listed(tiles.full_kv_count, tiles.full_kv_index, tile) == full
        assert listed(tiles.kv_count, tiles.kv_index, tile) == touched - full
        assert bool(touched) == (valid > tile * TILE // BLOCK)


@pytest.mark.parametrize("valid", [ANCHORS, 1, 0])
def test_attention_is_that_over_the_visible_intervals(valid: int) -> None:
    visible = visible_intervals(anchors_of(valid), torch.arange(CONTEXT), BLOCK)
    mask_mod = make_mask_mod(visible, CONTEXT)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(KEYS, WIDTH, generator=generator) for _ in range(2))
    chosen = torch.tensor([0, 31, 32, 5000, 20_001, QUERIES - 1])
    query = torch.randn(len(chosen), WIDTH, generator=generator)
    zero = torch.zeros((), dtype=torch.int64)
    mask = mask_mod(zero, zero, chosen[:, None], torch.arange(KEYS)[None, :])
    sees = mask.any(dim=1, keepdim=True)
    by_sdpa = functional.scaled_dot_product_attention(
        query[None, None], keys[None, None], values[None, None], attn_mask=mask | ~sees
    )[0, 0]
    by_sdpa = torch.where(sees, by_sdpa, 0.0)
    for row, number in enumerate(chosen.tolist()):
        expected = torch.zeros(WIDTH)
        if number // BLOCK < valid:
            context = torch.arange(int(visible.context_start[number]), int(visible.context_end[number]))
            block = torch.arange(int(visible.block_start[number]), int(visible.block_end[number]))
            seen = torch.cat((context, CONTEXT + block))
            assert len(seen) == anchors_of(valid).positions[number // BLOCK] + BLOCK
            expected = torch.softmax(keys[seen] @ query[row] / WIDTH**0.5, dim=0) @ values[seen]
        torch.testing.assert_close(by_sdpa[row], expected, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(by_sdpa).all()
