"""metrics.jsonl, the pace and the progress line."""

import io
import json
import math
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from drafter_trainer.acceptance import AcceptanceMetrics
from drafter_trainer.metrics import MetricsFile, StepRecord
from drafter_trainer.progress import Pace, Progress
from drafter_trainer.step import StepNumbers
from drafter_trainer.step_report import StepReporter, Waits
from tests.fakes.training import read_last_records

RECORD = StepRecord(
    step=0,
    loss=2.5,
    loss_hex=(2.5).hex(),
    applied=True,
    slot_accuracy=(0.5, 0.25),
    mean_matched_prefix=0.625,
    mean_matched_prefix_with_bonus=1.625,
    tokens=128,
    learning_rate=1e-3,
    gradient_norm=0.5,
    seconds=0.5,
    data_wait_seconds=0.1,
    checkpoint_wait_seconds=0.0,
    tokens_per_second=256.0,
    eta_seconds=None,
    incarnation=1,
    sequence_numbers=(0,),
    time="2026-01-01T00:00:00.000+00:00",
)


def test_the_last_record_of_a_step_counts_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in range(3):
        first.append(replace(RECORD, step=step))
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step":3,"lo')

    assert sorted(read_last_records(path)) == [0, 1, 2]
    second = MetricsFile(path)
    assert path.read_bytes() == whole
    second.append(replace(RECORD, step=2, loss=1.0, incarnation=2))
    second.sync()
    second.close()
    records = read_last_records(path)
    assert records[2]["loss"] == 1.0 and records[2]["incarnation"] == 2
    assert records[1]["loss"] == 2.5
    assert len(path.read_text().splitlines()) == 4


def test_the_newest_record_may_be_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.newest() is None
    for step in range(2):
        file.append(replace(RECORD, step=step))
    newest = file.newest()
    assert newest is not None and newest["step"] == 1 and newest["heldout_accepted_length"] is None
    file.append_fields(newest | {"heldout_accepted_length": 1.5})
    assert read_last_records(path)[1] == newest | {"heldout_accepted_length": 1.5}
    path.write_bytes(path.read_bytes() + b"\0\0\n")
    assert file.newest() is None
    file.close()


def test_the_first_ten_steps_do_not_spoil_the_estimate() -> None:
    pace = Pace(total_steps=100)
    for step in range(10):
        assert pace.eta_seconds(step, 60.0) is None
    assert pace.eta_seconds(10, 2.0) == pytest.approx(2.0 * 89)
    assert pace.eta_seconds(11, 4.0) == pytest.approx(3.0 * 88)
    assert pace.eta_seconds(99, 3.0) == 0.0


def test_plain_lines_appear_when_it_is_time_and_at_the_end() -> None:
    stream = io.StringIO()
    progress = Progress(3, log_every=1e9, stream=stream)
    progress.show(replace(RECORD, step=0, eta_seconds=3725.0))
    progress.show(replace(RECORD, step=1))
    progress.show(replace(RECORD, step=2, loss=None))
    first, last = stream.getvalue().splitlines()
    assert first.startswith("step 1/3 (33%)") and "loss 2.5000" in first and "accepted length 1.62" in first
    assert "256 tok/s" in first and "data wait 20%" in first and first.endswith("ETA 1:02:05")
    assert last.startswith("step 3/3 (100%)") and "loss not finite" in last and last.endswith("ETA …")


def test_a_terminal_gets_one_line_that_is_rewritten() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = Progress(2, log_every=10.0, stream=stream)
    progress.show(RECORD)
    progress.show(replace(RECORD, step=1))
    progress.end()
    progress.end()
    assert stream.getvalue().count("\r") == 2 and stream.getvalue().count("\n") == 1


def test_a_line_that_nobody_can_read_is_left_out() -> None:
    """The log lies on a full disk, or its reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    for descriptor in (os.open("/dev/full", os.O_WRONLY), writer):
        stream = os.fdopen(descriptor, "w")
        progress = Progress(2, log_every=0.0, stream=stream)
        progress.show(RECORD)
        progress.show(replace(RECORD, step=1))
        progress.end()
        with suppress(OSError):
            stream.close()


def test_records_say_what_was_waited_and_what_is_not_finite() -> None:
    now = [100.0]
    reporter = StepReporter(total_steps=2, tokens_per_step=1000, block_size=3, clock=lambda: now[0])
    reporter.begin()
    now[0] += 2.0
    numbers = StepNumbers(
        AcceptanceMetrics(loss=math.nan, weight=1.0, blocks=4, mean_matched_prefix=0.5, slot_accuracy=(1.0, 0.0)),
        gradient_norm=math.inf,
        applied=False,
        not_finite=(7,),
    )
    record = reporter.record(0, (7,), numbers, learning_rate=0.1, waits=Waits(0.5, 0.125), incarnation=3)
    assert (record.loss, record.loss_hex, record.gradient_norm, record.applied) == (None, "nan", None, False)
    assert (record.seconds, record.data_wait_seconds, record.tokens_per_second) == (2.0, 0.5, 500.0)
    assert record.mean_matched_prefix_with_bonus == 1.5
    now[0] += 1.0
    skipped = reporter.record(1, (), None, learning_rate=0.1, waits=Waits(0.75, 0.125), incarnation=3)
    assert skipped.data_wait_seconds == 0.25 and skipped.tokens == 2000 and not skipped.applied
    json.dumps(skipped.__dict__, allow_nan=False)
