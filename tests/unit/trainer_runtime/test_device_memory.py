"""Measured beside predicted: what is said, what is called a defect, and what a full device is told to change."""

import json
import logging
from pathlib import Path

import pytest
import torch

from drafter_trainer import memory as memory_module
from drafter_trainer.cost_report import CostReport
from drafter_trainer.memory import MemoryMeter, MemoryReport, sizes_of
from slipstream.errors import SlipstreamError
from slipstream.plan import gpus
from slipstream.plan.memory import GIB, MEASUREMENT, expected_in_warm_up, plan_memory
from slipstream.plan.refusal import refusal
from slipstream.plan.report import as_json, plan_run
from slipstream.plan.search import single_fits
from slipstream.plan.target_sizes import sizes_of_served
from slipstream.run_spec.load import parse_spec
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import EvalSpec, RunSpec
from slipstream.wire.target_config import TargetConfig

QWEN3_8B = TargetConfig(
    model_type="qwen3",
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=40_960,
    tie_word_embeddings=False,
    embedding_scale=1.0,
    logit_soft_cap=None,
    norm_weight_offset=0.0,
    tokenizer_length=151_669,
    mask_token_id=None,
    special_tokens={},
)
SPEC = RunSpec.model_validate(
    {
        "name": "large",
        "target": {"model": "Qwen/Qwen3-8B"},
        "data": {"files": ["a.jsonl"], "pack_tokens": 4096},
        "train": {"device": "cuda", "max_steps": 10},
    }
)

SPEC_ON_CPU = RunSpec.model_validate(
    {
        "name": "on-a-cpu",
        "target": {"model": "Qwen/Qwen3-8B"},
        "data": {"files": ["a.jsonl"], "pack_tokens": 4096},
        "train": {"device": "cpu", "attention": "sdpa", "max_steps": 10},
    }
)
CPU = torch.device("cpu")


class FakeMeter(MemoryMeter):
    """The numbers that a GPU would have given."""

    def __init__(self, peaks: dict[str, int]) -> None:
        super().__init__(torch.device("cpu"))
        self._peaks = {(phase, 4096): peak for phase, peak in peaks.items()}
        self.largest_reserved = max(peaks.values())


def measured(factor: float) -> tuple[MemoryReport, dict[str, int]]:
    sizes = sizes_of(SPEC, QWEN3_8B)
    report = MemoryReport(SPEC, QWEN3_8B, torch.device("cpu"))
    expected = expected_in_warm_up(sizes, plan_memory(sizes, report.card.memory_bytes))
    report.take(FakeMeter({phase: round(size * factor) for phase, size in expected.items()}))
    return report, expected


def test_what_the_plan_explains_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    report, expected = measured(1.08)
    with caplog.at_level(logging.INFO):
        report.log()
    assert [record.message for record in caplog.records] == ["memory"]
    assert [phase.phase for phase in report.phases()] == list(expected)
    written = json.loads(report.to_json())
    assert {phase["explained"] for phase in written["phases"]} == {True}
    assert written["phases"][0]["difference"] == pytest.approx(0.08, abs=1e-3)
    assert sum(written["predicted_parts"]["held"].values()) < written["predicted_peak_bytes"]


@pytest.mark.parametrize(("factor", "explained"), [(0.3, True), (1.05, True), (1.2, False)])
def test_a_measurement_may_take_less_than_its_bound(factor: float, explained: bool) -> None:
    spec = SPEC.model_copy(update={"eval": EvalSpec(heldout="answers.jsonl")})
    report = MemoryReport(spec, QWEN3_8B, CPU)
    sizes = sizes_of(spec, QWEN3_8B)
    plan = plan_memory(sizes, report.card.memory_bytes)
    bound = expected_in_warm_up(sizes, plan)[MEASUREMENT]
    # Of the packs, the one at hand alone is there.
    assert plan.phase_bytes(MEASUREMENT) - bound == plan.held["packs"] - sizes.pack_bytes + sizes.measured_pack_bytes
    report.take(FakeMeter({MEASUREMENT: round(bound * factor)}))
    (phase,) = report.phases()
    assert phase.phase == MEASUREMENT and phase.is_explained == explained


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_more_than_a_tenth_off_is_called_a_defect(factor: float, caplog: pytest.LogCaptureFixture) -> None:
    report, expected = measured(factor)
    report.log()
    warnings = [record for record in caplog.records if record.message == "memory_unexplained"]
    assert len(warnings) == len(expected)
    fields = warnings[0].slipstream_fields  # type: ignore[attr-defined]
    assert fields["difference"] == f"{factor - 1:+.0%}" and "defect" in fields


def test_a_run_on_a_cpu_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    meter = MemoryMeter(torch.device("cpu"))
    meter.begin()
    meter.ended("forward", 128)
    report = MemoryReport(SPEC, QWEN3_8B, torch.device("cpu"))
    report.note("frozen weights")
    report.take(meter)
    with caplog.at_level(logging.INFO):
        report.log()
    assert not caplog.records and json.loads(report.to_json())["phases"] == []


def with_host_memory(monkeypatch: pytest.MonkeyPatch, total: int, available: int) -> None:
    for module in (gpus, memory_module):
        monkeypatch.setattr(module, "memory_bytes", lambda: (total, available))


def test_a_full_cpu_is_told_what_was_predicted_measured_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with_host_memory(monkeypatch, 24 * GIB, 1 * GIB)
    report = MemoryReport(SPEC_ON_CPU, QWEN3_8B, CPU)
    with pytest.raises(SlipstreamError) as refused, report.shortage_explained():
        raise SlipstreamError("Full.", reason=Reason.OUT_OF_MEMORY, remedy="Stop other programs.")
    assert refused.value.message.startswith("Full. Predicted: at most ") and "Measured: this process had " in (
        refused.value.message
    )
    assert "MiB at most, of 24576; now 1024 are free." in refused.value.message
    assert refused.value.remedy.startswith("Nearest settings that fit into ")
    assert "--set " in refused.value.remedy and refused.value.remedy.endswith(". Stop other programs.")
    with pytest.raises(SlipstreamError, match="^other$"), report.shortage_explained():
        raise SlipstreamError("other", reason=Reason.DISK_FULL)


def test_a_cpu_run_that_cannot_fit_does_not_begin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system would end it by a signal, or another process, and nobody would say why."""
    with_host_memory(monkeypatch, 16 * GIB, 16 * GIB)
    with pytest.raises(SlipstreamError, match=r"The run needs .* a CPU with .* has 16\.0 GiB\.") as refused:
        MemoryReport(SPEC_ON_CPU, QWEN3_8B, CPU).require_room()
    assert refused.value.reason is Reason.OUT_OF_MEMORY and refused.value.exit_code == 6
    settings = refused.value.remedy.partition("GiB: ")[2].partition(". ")[0].rstrip(".").replace("--set ", "").split()
    changed = parse_spec(SPEC_ON_CPU.model_dump(mode="json"), settings)
    MemoryReport(changed, QWEN3_8B, CPU).require_room()
    assert not caplog.records
    with_host_memory(monkeypatch, 640 * GIB, 1 * GIB)
    MemoryReport(SPEC_ON_CPU, QWEN3_8B, CPU).require_room()
    assert [record.message for record in caplog.records] == ["memory_short"]


def test_the_plan_is_that_of_the_command_line_longest_answer_included(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is proposed may not cut packs below it: the run would then be refused for its answers."""
    with_host_memory(monkeypatch, 16 * GIB, 16 * GIB)
    answers = tmp_path / "answers.jsonl"
    row = {"source": "news", "target_fingerprint": "f", "input_ids": [1] * 4000, "loss_mask": [0] * 100 + [1] * 3900}
    answers.write_text(json.dumps(row))
    spec = SPEC_ON_CPU.model_copy(update={"eval": EvalSpec(heldout=str(answers))})
    report = MemoryReport(spec, QWEN3_8B, CPU)
    plan = plan_run(spec, sizes_of_served(QWEN3_8B), report.card)
    assert report.sizes == plan.sizes and plan.sizes.least_pack_tokens == 4000
    assert json.loads(report.to_json())["predicted_peak_bytes"] == as_json(plan)["memory"]["peak_bytes"]
    assert CostReport(spec, report)._predicted["step_seconds"] == plan.cost.step_seconds
    with pytest.raises(SlipstreamError) as refused:
        report.require_room()
    assert str(refused.value) == str(refusal(plan.sizes, plan.card))
    a_little_less = plan.memory.peak_bytes - 1, report.card.memory_bytes
    for sizes, shorter_helps in ((report.sizes, False), (sizes_of(SPEC_ON_CPU, QWEN3_8B), True)):
        settings = [setting for fit in single_fits(sizes, *a_little_less) for setting in fit.settings]
        assert any("pack_tokens" in setting for setting in settings) == shorter_helps, settings


def test_held_out_answers_of_no_use_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("{}")
    with pytest.raises(SlipstreamError) as refused:
        MemoryReport(SPEC.model_copy(update={"eval": EvalSpec(heldout=str(answers))}), QWEN3_8B, CPU)
    assert refused.value.reason is Reason.DATA_INVALID


def test_a_full_device_is_told_what_fits() -> None:
    report, expected = measured(1.0)
    words = report.shortage_in_words(1 * GIB, 22 * GIB)
    assert f"backward {round(expected['backward'] / 2**20)} MiB" in words and "22528 MiB reserved" in words
    way = report.way_out(16 * GIB, 16 * GIB)
    assert way.startswith("Nearest settings that fit into 16384 MiB: --set ")
    assert "No setting" in report.way_out(2 * GIB, 24 * GIB)
    # It was predicted to fit, and did not: it must still become smaller.
    assert "--set " in report.way_out(200 * GIB, 200 * GIB)
