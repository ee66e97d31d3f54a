"""A run on a CPU: memory that autograd keeps and processes took, work, and what must hold for all sizes."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.memory_on_cpu import ALLOWED, Shape, planned
from benchmarks.peers.workload import TINY, drafter_config, frozen_weights, make_pack, run_spec
from benchmarks.results_file import RESULTS
from drafter_trainer.step import TrainingStep
from drafter_trainer.training_packs import StepBatch, TrainingPack
from slipstream.plan.cost import step_flop
from slipstream.plan.cpu_memory import kept_by_forward, mask_bytes
from slipstream.plan.memory import MEASUREMENT, MIB, plan_memory
from slipstream.plan.sizes import RunSizes, TargetSizes
from slipstream.run_spec.spec import RunSpec

CPU = torch.device("cpu")
SIZE = replace(TINY, tokens=384, anchors=48, head_dim=16, heads=6, kv_heads=2, hidden=80, layers=3)
"""Where no two widths are equal."""
MEASURED = json.loads((RESULTS / "memory_on_cpu.json").read_text(encoding="utf-8"))


def sizes_of(spec: RunSpec) -> RunSizes:
    facts = TargetSizes(
        *(SIZE.target_layers, SIZE.hidden, SIZE.intermediate, SIZE.heads, SIZE.kv_heads, SIZE.head_dim, SIZE.vocab),
        SIZE.tied,
    )
    return RunSizes.of(spec, facts)


def recipe(precision: str, **train: Any) -> RunSpec:
    spec = run_spec(SIZE, CPU, precision=precision, **train).model_dump()
    spec["target"]["dtype"] = precision
    spec["drafter"]["target_layer_ids"] = SIZE.target_layer_ids
    return RunSpec.model_validate(spec)


def test_attention_computes_every_query_with_every_key() -> None:
    """Counted with scores that are written: those are kept, while the flash kernel's backward computes them again."""
    spec = recipe("float32")
    step = TrainingStep(drafter_config(SIZE), frozen_weights(SIZE, CPU), spec)
    step.load_weights(step.first_weights(0))
    pack = make_pack(SIZE, CPU, 0, split_features=True)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step.run(StepBatch(0, (TrainingPack(0, dict(pack.tensors), pack.anchors),)), 1e-5).wait()
    scores_and_sums = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    assert scores_and_sums == step_flop(sizes_of(spec))["attention"] * 6 / 7


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_kept_is_what_autograd_keeps(precision: str) -> None:
    spec, dtype = recipe(precision), getattr(torch, precision)
    frozen = frozen_weights(SIZE, CPU)
    frozen = replace(frozen, embedding=frozen.embedding.to(dtype), head=frozen.head.to(dtype))
    step = TrainingStep(drafter_config(SIZE), frozen, spec)
    step.load_weights(step.first_weights(0))
    pack = make_pack(SIZE, CPU, 0, split_features=True)
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in pack.tensors.items()}
    given = (*step.drafter.parameters(), frozen.embedding)
    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    kept: dict[int, int] = {}
    alive = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    inputs = step._inputs_of(TrainingPack(0, tensors, pack.anchors))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sums = step._pack_loss(inputs, SIZE.tokens)
    assert torch.isfinite(sums.numerator)
    sizes = sizes_of(spec)
    # Embedding rows, labels and the like are integers of a row each.
    assert sum(kept.values()) == pytest.approx(sum(kept_by_forward(sizes).values()) + mask_bytes(sizes), rel=0.02)


@pytest.mark.parametrize("name", MEASURED["raw"])
def test_a_process_took_what_the_plan_says(name: str) -> None:
    """With the shapes' plans of today: a formula that changes must stay near what was measured."""
    measured = MEASURED["raw"][name]["measured"]
    predicted = planned(Shape(**MEASURED["shapes"][name])).peak_bytes
    assert (1 - ALLOWED) * predicted <= measured <= (1 + ALLOWED) * predicted, (measured / MIB, predicted / MIB)


def test_layers_computed_again_keep_less_and_are_there_once_in_the_backward() -> None:
    sizes = sizes_of(recipe("float32"))
    plans = [plan_memory(replace(sizes, checkpointed_layers=again), 0) for again in range(SIZE.layers + 1)]
    peaks = [plan.phase_bytes("loss") for plan in plans]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0]
    backward = plans[-1].phases["backward"]
    one_layer = sum(kept_by_forward(sizes).values()) - sum(kept_by_forward(replace(sizes, num_layers=2)).values())
    assert 0 < backward["a layer computed again"] <= one_layer


def test_held_out_packs_stay_in_the_hosts_memory() -> None:
    sizes = replace(sizes_of(recipe("float32")), measures=True)
    without, plan = plan_memory(sizes, 0), plan_memory(replace(sizes, heldout_tokens=3 * sizes.pack_tokens), 0)
    assert plan.held["held-out packs"] == 3 * sizes.measured_pack_bytes
    assert plan.peak_bytes == without.peak_bytes + plan.held["held-out packs"]
    assert plan.worst_phase != MEASUREMENT
