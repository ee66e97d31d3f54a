"""Copies to the device: whatever lies where, each tensor arrives as it was, and neighbours travel together."""

import pytest
import torch
from torch import Tensor

from drafter_trainer.device_copy import _runs, copied_in_runs
from slipstream.wire.codec import plan_layout, view_bytes

CPU = torch.device("cpu")


def payload(*entries: tuple[str, torch.dtype, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors as they lie in a slot of a server's segment, with random bytes."""
    layout = plan_layout(entries)
    raw = torch.randint(0, 256, (layout.size_bytes,), dtype=torch.uint8)
    return {spec.name: view_bytes(raw, spec) for spec in layout.specs}


PACK = payload(
    ("input_ids", torch.int32, (300,)),
    ("loss_mask", torch.uint8, (300,)),
    ("hidden_states.3", torch.bfloat16, (300, 8)),
    ("hidden_states.7", torch.bfloat16, (300, 8)),
    ("position_ids", torch.int32, (300,)),
)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Bit for bit: random bytes are NaN now and then."""
    return list(ours) == list(theirs) and all(
        ours[name].dtype == theirs[name].dtype
        and ours[name].shape == theirs[name].shape
        and torch.equal(ours[name].contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8))
        for name in theirs
    )


def test_a_payload_is_one_copy_and_what_was_made_here_another_each() -> None:
    drawn = {"anchor_positions": torch.arange(40), "anchor_valid": torch.arange(40) < 7}
    tensors = {**PACK, **drawn}
    assert sorted(len(run.names) for run in _runs(tensors)) == [1, 1, len(PACK)]
    assert same(copied_in_runs(tensors, CPU), tensors)


def test_layers_that_nobody_asked_for_are_not_copied() -> None:
    wide = payload(
        ("input_ids", torch.int32, (64,)),
        *((f"hidden_states.{layer}", torch.bfloat16, (64, 64)) for layer in range(4)),
        ("position_ids", torch.int32, (64,)),
    )
    wanted = {name: wide[name] for name in ("hidden_states.0", "hidden_states.3", "position_ids", "input_ids")}
    assert [run.names for run in _runs(wanted)] == [
        ["input_ids", "hidden_states.0"],
        ["hidden_states.3", "position_ids"],
    ]
    assert same(copied_in_runs(wanted, CPU), wanted)


@pytest.mark.parametrize("seed", range(10))
def test_any_parts_of_any_memories_arrive_as_they_were(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def number(below: int) -> int:
        return int(torch.randint(0, below, (), generator=generator))

    memories = [torch.randint(0, 256, (40_000,), dtype=torch.uint8, generator=generator) for _ in range(3)]
    tensors = {}
    for index in range(12):
        dtype = (torch.uint8, torch.bfloat16, torch.int32, torch.int64)[number(4)]
        begin, count = 8 * number(4000), 8 * (1 + number(90))
        tensors[f"t{index}"] = memories[number(3)][begin : begin + count].view(dtype)
    assert same(copied_in_runs(tensors, CPU), tensors)


def test_an_empty_pack_is_no_copy() -> None:
    assert copied_in_runs({}, CPU) == {}
