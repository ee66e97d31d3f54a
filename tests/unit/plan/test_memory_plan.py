"""Predicted memory and cost: known numbers, and what must hold for all sizes."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafter_trainer.drafter import DFlashDrafter
from drafter_trainer.drafter_config import FULL, DFlashConfig
from drafter_trainer.loss import _chunk_length, resolve_loss_config
from drafter_trainer.optimizer import DrafterOptimizer
from drafter_trainer.training_packs import payload_shapes
from slipstream.plan.cost import checkpoint_bytes, plan_cost, step_flop
from slipstream.plan.memory import (
    GIB,
    chunk_blocks,
    expected_in_warm_up,
    plan_memory,
    saved_activations,
    slack_bytes,
)
from slipstream.plan.sizes import RunSizes
from slipstream.run_spec.spec import LossSpec, OptimizerSpec
from tests.unit.plan.sizes import H200_BYTES, SIZES, A, B, C

SMALL = replace(
    A, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_layers=2,
    num_features=3, vocab_size=512,
)  # fmt: skip

PHASES = ("forward", "loss", "backward", "optimizer")


def drafter_of(sizes: RunSizes, device: str) -> DFlashDrafter:
    config = DFlashConfig(
        target_model_type="llama",
        num_target_layers=30,
        target_layer_ids=tuple(range(sizes.num_features)),
        vocab_size=sizes.vocab_size,
        mask_token_id=0,
        embedding_scale=1.0,
        logit_soft_cap=None,
        block_size=sizes.block_size,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate_size,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=4096,
        layer_types=(FULL,) * sizes.num_layers,
        sliding_window=None,
    )
    with torch.device(device):
        return DFlashDrafter(config)


@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_those_of_the_drafter(size: str) -> None:
    sizes = SIZES[size]
    parameters = list(drafter_of(sizes, "meta").parameters())
    assert sum(parameter.numel() for parameter in parameters) == sizes.parameters
    assert sum(parameter.numel() for parameter in parameters if parameter.dim() == 2) == sizes.matrix_parameters


@pytest.mark.parametrize("settings", [{}, {"kind": "muon"}, {"ema_decay": 0.99}, {"kind": "muon", "ema_decay": 0.9}])
def test_a_checkpoint_holds_what_the_optimizer_gives(settings: dict[str, Any]) -> None:
    spec = OptimizerSpec.model_validate(settings)
    optimizer = DrafterOptimizer(drafter_of(SMALL, "cpu"), spec, compute_dtype=torch.bfloat16)
    state = {**optimizer.deployed_weights(), **{f"optimizer/{k}": v for k, v in optimizer.state_tensors().items()}}
    given = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    sizes = replace(SMALL, optimizer=spec.kind, moving_average=spec.ema_decay is not None)
    assert checkpoint_bytes(sizes) == pytest.approx(given, abs=64)


def test_a_pack_has_the_bytes_of_its_payload() -> None:
    shapes = payload_shapes([f"hidden_states.{layer}" for layer in range(5)], C.pack_tokens, C.hidden_size)
    rows = {"input_ids": 4, "loss_mask": 1, "document_ids": 4, "position_ids": 4}
    total = sum(torch.Size(shape).numel() * rows.get(name, C.wire_bytes) for name, shape in shapes.items())
    assert C.pack_bytes == total


@pytest.mark.parametrize("objective", ["cross_entropy", "kl"])
@pytest.mark.parametrize("rows", [None, 700])
def test_the_chunk_is_the_one_that_the_loss_takes(
    objective: str, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        total_memory = H200_BYTES

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    spec = LossSpec.model_validate({"objective": objective, "chunk_rows": rows})
    config = resolve_loss_config(
        spec, block_size=C.block_size, vocab_size=C.vocab_size, logit_soft_cap=None, device=torch.device("cuda")
    )
    sizes = replace(C, needs_target_distribution=objective != "cross_entropy", chunk_rows=rows)
    assert chunk_blocks(sizes, H200_BYTES) == _chunk_length(sizes.anchors_per_pack, config)
    config = resolve_loss_config(
        spec, block_size=C.block_size, vocab_size=C.vocab_size, logit_soft_cap=None, device=torch.device("cpu")
    )
    assert chunk_blocks(replace(sizes, on_cpu=True), 0) == _chunk_length(sizes.anchors_per_pack, config)


# Of torch's allocator on an H200, GiB: benchmarks/train_step.py, which holds three packs.
MEASURED = {"A": (21.50, 21.81), "A in FP8": (23.99, 24.21), "C": (2.99, 3.76)}


@pytest.mark.parametrize("name", MEASURED)
def test_peaks_are_what_was_measured(name: str) -> None:
    sizes = replace(SIZES[name[0]], fp8="FP8" in name)
    allocated, reserved = MEASURED[name]
    plan = plan_memory(sizes, H200_BYTES)
    predicted = plan.phase_bytes(plan.worst_phase) - plan.held["packs"] + 3 * sizes.pack_bytes
    assert predicted == pytest.approx(allocated * GIB, rel=0.06)
    assert predicted + slack_bytes(predicted) == pytest.approx(reserved * GIB, rel=0.1)


def test_phases_of_size_c_are_what_a_run_measured() -> None:
    """memory.json of a run that learns the target's distribution, 17 blocks a chunk."""
    measured = {
        "frozen weights": 56_625_664,
        "drafter and optimizer": 328_193_536,
        "forward": 1_622_992_384,
        "loss": 1_696_111_616,
        "backward": 1_885_459_456,
        "optimizer": 492_447_232,
    }
    sizes = replace(C, needs_target_distribution=True, chunk_rows=17 * 15)
    expected = expected_in_warm_up(sizes, plan_memory(sizes, H200_BYTES))
    assert expected == pytest.approx(measured, rel=0.09)


def test_size_a_and_b_lie_where_the_design_wants_them() -> None:
    assert plan_memory(A, H200_BYTES).peak_bytes < 26 * GIB
    without_optimizer = ("masters", "gradients", "optimizer")
    plan = plan_memory(B, H200_BYTES)
    held = sum(size for part, size in plan.held.items() if part not in without_optimizer)
    worst = held + max(sum(plan.phases[phase].values()) for phase in ("forward", "loss", "backward"))
    assert 64.7e9 / worst > 1.3


def test_nominal_work_of_size_a() -> None:
    assert sum(step_flop(A).values()) == pytest.approx(75.7e12, rel=0.005)
    cost = plan_cost(A, tflops=533.0, total_steps=1000, keep=3)
    assert cost.step_seconds == pytest.approx(0.142, rel=0.01)
    assert cost.total_seconds == pytest.approx(142.0, rel=0.01)
    assert cost.disk_bytes == 4 * cost.checkpoint_bytes
    assert cost.wire_bytes_per_second == pytest.approx(cost.wire_bytes_per_pack / cost.step_seconds)


@pytest.mark.parametrize("size", SIZES)
def test_the_whole_is_the_sum_of_its_parts(size: str) -> None:
    sizes = SIZES[size]
    plan = plan_memory(sizes, H200_BYTES)
    assert tuple(plan.phases) == PHASES
    for phase, parts in plan.phases.items():
        assert plan.phase_bytes(phase) == sum(plan.held.values()) + sum(parts.values())
    assert plan.peak_bytes == max(map(plan.phase_bytes, PHASES)) + sum(plan.outside.values())
    assert plan.phases["forward"]["activations"] == sum(saved_activations(sizes).values())
    in_warm_up = expected_in_warm_up(sizes, plan)
    assert in_warm_up["frozen weights"] < in_warm_up["drafter and optimizer"] < in_warm_up["optimizer"]
    assert all(in_warm_up[phase] <= plan.phase_bytes(phase) for phase in PHASES)


GROWING = {
    "hidden_size": 8192,
    "intermediate_size": 20_000,
    "num_attention_heads": 128,
    "num_key_value_heads": 32,
    "vocab_size": 300_000,
    "num_layers": 9,
    "num_features": 9,
    "block_size": 48,
    "pack_tokens": 16_384,
    "anchors_per_pack": 2048,
    "packs_per_step": 8,
    "prefetch_packs": 12,
    "compute_bytes": 4,
    "wire_bytes": 4,
    "moving_average": True,
    "cuda_graphs": True,
    "fp8": True,
}


@pytest.mark.parametrize("field", GROWING)
@pytest.mark.parametrize("size", SIZES)
def test_more_of_anything_never_needs_less(field: str, size: str) -> None:
    """With a fixed chunk: the default one shrinks as the vocabulary grows."""
    sizes = replace(SIZES[size], chunk_rows=2048)
    larger = replace(sizes, **{field: GROWING[field]})
    now, then = plan_memory(sizes, H200_BYTES), plan_memory(larger, H200_BYTES)
    # Whole blocks: a chunk of longer blocks can be a few rows shorter.
    room = 48 * larger.vocab_size * 12 if field == "block_size" else 0
    assert all(then.phase_bytes(phase) + room >= now.phase_bytes(phase) for phase in PHASES)
    assert checkpoint_bytes(larger) >= checkpoint_bytes(sizes)
    assert sum(step_flop(larger).values()) >= sum(step_flop(sizes).values())


@pytest.mark.parametrize("size", SIZES)
def test_computing_layers_again_keeps_less(size: str) -> None:
    sizes = SIZES[size]
    counts = range(sizes.num_layers + 1)
    kept = [sum(saved_activations(replace(sizes, checkpointed_layers=count)).values()) for count in counts]
    # The last one saves nothing: its own are there when its backward begins.
    assert all(more < less for less, more in itertools.pairwise(kept[:-1])) and kept[-1] < kept[0] / 2
    faster, slower = (
        plan_cost(replace(sizes, checkpointed_layers=how), tflops=500.0, total_steps=None, keep=1)
        for how in (0, sizes.num_layers)
    )
    assert faster.step_flop == slower.step_flop and 1.05 < slower.step_seconds / faster.step_seconds < 4 / 3
    assert (
        plan_memory(replace(sizes, optimizer="muon"), H200_BYTES).held_bytes
        != plan_memory(sizes, H200_BYTES).held_bytes
    )
