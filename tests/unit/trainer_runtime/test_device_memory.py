"""Measured beside predicted: what is said, what is called a defect, and what a full device is told to change."""

import json
import logging

import pytest
import torch

from drafter_trainer.memory import MemoryMeter, MemoryReport, sizes_of
from slipstream.errors import SlipstreamError
from slipstream.plan.memory import GIB, expected_in_warm_up, plan_memory
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
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


class FakeMeter(MemoryMeter):
    """The numbers that a GPU would have given."""

    def __init__(self, peaks: dict[str, int]) -> None:
        super().__init__(torch.device("cpu"))
        self._peaks = {(phase, 4096): peak for phase, peak in peaks.items()}
        self.largest_reserved = max(peaks.values())


def measured(factor: float) -> tuple[MemoryReport, dict[str, int]]:
    sizes = sizes_of(SPEC, QWEN3_8B)
    report = MemoryReport(SPEC, QWEN3_8B, torch.device("cpu"))
    expected = expected_in_warm_up(sizes, plan_memory(sizes, 0))
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
    with pytest.raises(SlipstreamError, match="^full$"), report.shortage_explained():
        raise SlipstreamError("full", reason=Reason.OUT_OF_MEMORY)


def test_a_full_device_is_told_what_fits() -> None:
    report, expected = measured(1.0)
    words = report.shortage_in_words(1 * GIB, 22 * GIB)
    assert f"backward {round(expected['backward'] / 2**20)} MiB" in words and "22528 MiB reserved" in words
    way = report.way_out(16 * GIB, 16 * GIB)
    assert way.startswith("Nearest settings that fit into 16384 MiB: --set ")
    assert "No setting" in report.way_out(2 * GIB, 24 * GIB)
    # It was predicted to fit, and did not: it must still become smaller.
    assert "--set " in report.way_out(200 * GIB, 200 * GIB)
