"""Which blocks are drawn from a pack, and what their slots read and must predict."""

import numpy as np
import pytest
import torch

from drafter_trainer.anchors import _smallest, build_block_targets, draw_anchors
from tests.fakes.dense_reference import blocks_of
from tests.fakes.drafter_cases import MASK_TOKEN, anchor_list, as_lists, packed, random_lengths


def candidates(pack: dict) -> list[int]:
    lists = as_lists(pack)
    return [
        row
        for row in range(len(lists["input_ids"]) - 1)
        if lists["loss_mask"][row]
        and lists["loss_mask"][row + 1]
        and lists["document_ids"][row] == lists["document_ids"][row + 1] != -1
    ]


def draw(pack: dict, num_anchors: int, seed: int = 0, number: int = 0) -> list[int | None]:
    return anchor_list(draw_anchors(pack["loss_mask"], pack["document_ids"], num_anchors, seed, number))


def test_anchors_are_candidates_sorted_and_different() -> None:
    pack = packed([20, 3, 1, 30], 64)
    anchors = draw(pack, 16)
    assert None not in anchors
    assert anchors == sorted(set(anchors))
    assert set(anchors) <= set(candidates(pack))


def test_a_pack_with_few_candidates_uses_all_and_pads() -> None:
    pack = packed([5, 4, 2], 16, supervised=0.8, seed=3)
    expected = candidates(pack)
    assert 0 < len(expected) < 16
    assert draw(pack, 16) == expected + [None] * (16 - len(expected))


def test_a_pack_without_candidates_gives_invalid_anchors_only() -> None:
    pack = packed([1, 1, 1], 8, supervised=1.0)
    assert draw(pack, 4) == [None] * 4


def test_the_draw_depends_on_seed_and_number_and_nothing_else() -> None:
    pack = packed([200], 256)
    torch.manual_seed(1)
    first = draw(pack, 16, seed=7, number=3)
    torch.manual_seed(2)
    assert draw(pack, 16, seed=7, number=3) == first
    assert draw(pack, 16, seed=8, number=3) != first
    assert draw(pack, 16, seed=7, number=4) != first


def test_the_draw_is_the_same_on_every_version() -> None:
    pack = packed([100], 128, supervised=1.0)
    assert draw(pack, 6, seed=1, number=2) == [25, 26, 28, 46, 79, 92]


@pytest.mark.parametrize("seed", range(20))
def test_the_smallest_keys_are_those_that_a_stable_sort_puts_first(seed: int) -> None:
    """Also where keys are equal, so that a run that goes on under a newer version draws as it did."""
    rng = np.random.default_rng(seed)
    for most in (4, 1 << 63):
        keys = rng.integers(0, most, rng.integers(0, 60)).astype(np.uint64)
        for count in (1, len(keys) // 2 + 1, len(keys) + 1):
            expected = np.sort(np.argsort(keys, kind="stable")[:count])
            assert np.array_equal(_smallest(keys, count), expected)


def test_the_draw_is_uniform() -> None:
    pack = packed([11], 16, supervised=1.0)
    counts = torch.zeros(10)
    for number in range(600):
        for anchor in draw(pack, 3, number=number):
            counts[anchor] += 1
    # 600 · 3 / 10 expected, standard deviation √(600 · 0.3 · 0.7) = 11.2.
    assert (counts - 180).abs().max() < 4.5 * 11.2


@pytest.mark.parametrize("block_size", [7, 8, 16])
@pytest.mark.parametrize("seed", range(8))
def test_targets_equal_a_walk_over_slots(block_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pack = packed(random_lengths(96, generator), 96, seed=seed)
    anchors = draw_anchors(pack["loss_mask"], pack["document_ids"], 92, seed, 0)
    targets = build_block_targets(pack, anchors, block_size=block_size, mask_token_id=MASK_TOKEN)
    blocks = blocks_of(as_lists(pack), anchor_list(anchors), block_size, MASK_TOKEN)
    assert not all(anchors.valid)
    for i, block in enumerate(blocks):
        assert targets.counted[i].tolist() == [label is not None for label in block.labels]
        assert targets.labels[i].min() >= 0
        for slot, label in enumerate(block.labels):
            assert label is None or targets.labels[i, slot] == label
        if block.anchor >= 0:
            assert targets.block_ids[i].tolist() == block.token_ids
            first = int(pack["position_ids"][block.anchor])
            assert targets.block_positions[i].tolist() == list(range(first, first + block_size))


def test_a_gap_ends_what_counts() -> None:
    pack = packed([10], 16, supervised=1.0)
    pack["loss_mask"][4] = 0
    anchors = draw_anchors(pack["loss_mask"], pack["document_ids"], 10, 0, 0)
    targets = build_block_targets(pack, anchors, block_size=8, mask_token_id=MASK_TOKEN)
    # Anchor 1: rows 2 and 3 count, row 4 is the gap, rows 5 to 8 are supervised and yet can't be accepted past it.
    assert targets.counted[anchors.positions.tolist().index(1)].tolist() == [False, True, True] + [False] * 5
