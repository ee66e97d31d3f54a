"""What a run cost, beside what the plan said."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter_trainer.cost_report import CostReport, costs_json, log_costs
from drafter_trainer.memory import MemoryReport
from slipstream.plan.cost import checkpoint_bytes
from slipstream.plan.gpus import this_cpu
from slipstream.plan.report import plan_run
from slipstream.plan.sizes import TargetSizes
from tests.unit.trainer_runtime.test_device_memory import QWEN3_8B, SPEC, SPEC_ON_CPU
from tests.unit.trainer_runtime.test_metrics import RECORD

WAITED = replace(RECORD, seconds=3.0, data_wait_seconds=1.0, checkpoint_wait_seconds=0.5, heldout_seconds=0.25)


def report(steps: int) -> CostReport:
    found = CostReport(SPEC_ON_CPU, MemoryReport(SPEC_ON_CPU, QWEN3_8B, torch.device("cpu")))
    for _ in range(min(steps, 10)):
        found.count(replace(RECORD, seconds=60.0))
    for _ in range(steps - 10):
        found.count(WAITED)
    return found


def test_every_number_of_the_plan_has_its_measured_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "drafter.safetensors").write_bytes(bytes(1 << 21))
    costs = report(12).compared(pack_bytes=1 << 20, checkpoint=tmp_path)
    target = TargetSizes(**{name: getattr(QWEN3_8B, name) for name in TargetSizes.__dataclass_fields__})
    plan = plan_run(SPEC_ON_CPU, target, this_cpu())
    assert costs["step_seconds"].predicted == plan.cost.step_seconds and costs["step_seconds"].measured == 1.25
    assert costs["wire_bytes_per_pack"].predicted == plan.cost.wire_bytes_per_pack
    assert costs["checkpoint_bytes"].predicted == checkpoint_bytes(plan.sizes)
    assert costs["peak_bytes"].predicted == plan.memory.peak_bytes and costs["peak_bytes"].measured > 1 << 20
    written = json.loads(costs_json(costs))
    assert written["wire_bytes_per_pack"]["measured"] == 1 << 20 and written["checkpoint_bytes"]["difference"] < 0
    with caplog.at_level(logging.INFO):
        log_costs(costs)
    fields = caplog.records[0].slipstream_fields  # type: ignore[attr-defined]
    assert fields["step_ms"].startswith("1250/") and fields["pack_mib"].startswith("1/")


def test_what_was_not_measured_is_not_guessed(tmp_path: Path) -> None:
    costs = report(10).compared(pack_bytes=0, checkpoint=None)
    unmeasured = {name for name, cost in costs.items() if cost.measured is None and cost.difference is None}
    assert unmeasured == {"step_seconds", "wire_bytes_per_pack", "checkpoint_bytes"}
    gone = report(1).compared(pack_bytes=0, checkpoint=tmp_path / "pruned")
    assert gone["checkpoint_bytes"].measured is None
    assert report(0).compared(pack_bytes=0, checkpoint=None) == {}, "an earlier process has measured more"


def test_an_architecture_that_the_plan_does_not_know_has_no_costs() -> None:
    memory = MemoryReport(SPEC, QWEN3_8B, torch.device("cpu"))
    memory.sizes = None
    unknown = CostReport(SPEC, memory)
    unknown.count(RECORD)
    assert unknown.compared(pack_bytes=1, checkpoint=None) == {}
