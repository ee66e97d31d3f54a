"""What a run measured on held-out answers, and what its trainer reads packs over, in the commands that list."""

import json

import pytest

from slipstream.wire.data_report import Finding, ReportBuilder
from tests.fakes.control_plane import Desk, checkpoint, record, report
from tests.unit.cli.conftest import Command

MEASURED = {"heldout_accepted_length": 1.25, "heldout_sources": {"chat": {"accepted_length": 1.125}}}
BEST = {"accepted_length": 1.5, "by_source": {"code": 1.625, "chat": 1.375}}


@pytest.fixture
def measured(desk: Desk) -> Desk:
    """Run demo is best at step 1, and was measured again at step 2."""
    listed = [checkpoint(1) | {"heldout": BEST, "is_best": True}, checkpoint(2), checkpoint(3)]
    listed[1] |= {"heldout": {"accepted_length": 1.25, "by_source": {"chat": 1.125}}}
    batch = {"first_index": 0, "records": [record(0), record(1) | MEASURED, record(2)]}
    desk.beat(report=report(desk.running(), "RUNNING", metrics=batch, checkpoints=listed, transport="grpc"))
    return desk


def test_runs(measured: Desk, slipstream: Command) -> None:
    header, run = slipstream("run", "ls").out.splitlines()
    assert " ".join(header.split()).endswith("LOSS ACCEPTED HELD OUT BEST TOKENS/S ETA TRAINER TARGET TRANSPORT AGE")
    assert run.split()[5:9] == ["-", "1.250", "1.500", "256"] and "grpc" in run.split()


def test_one_run(measured: Desk, slipstream: Command) -> None:
    lines = [" ".join(line.split()) for line in slipstream("run", "get", "demo").out.splitlines()]
    assert "accepted length, held out 1.250 at step 2 (chat 1.125)" in lines
    assert "best checkpoint 1.500 at step 1 (chat 1.375, code 1.625)" in lines
    assert "transport grpc" in lines
    assert any(line.startswith("progress step") and ", held out 1.250, " in line for line in lines)
    whole = json.loads(slipstream("run", "get", "demo", "-o", "json").out)
    assert whole["heldout"]["best"] == BEST | {"step": 1}


def test_checkpoints(measured: Desk, slipstream: Command) -> None:
    answer = slipstream("checkpoint", "ls", "demo")
    header, *rows = answer.out.splitlines()
    assert "ACCEPTED LENGTH, HELD OUT  BY SOURCE" in header and "BEST" in header
    # Step, date and time come first.
    assert [row.split()[3:-2] for row in rows] == [
        ["1.500", "chat", "1.375,", "code", "1.625", "best"],
        ["1.250", "chat", "1.125"],
        ["-", "-"],
    ]
    assert answer.err == "next: slipstream eval demo@best\n"


def test_what_was_dropped_of_the_data(desk: Desk, slipstream: Command) -> None:
    found = ReportBuilder()
    found.read, found.used = 2000, 1993
    for line in range(7):
        found.drop(Finding.NO_ASSISTANT_TURN, f"a.jsonl:{line}")
    work = desk.running()
    assert "\ndata " not in slipstream("run", "get", "demo").out, "not known yet"
    desk.beat(report=report(work, "RUNNING", data=found.build("train").account()))
    shown = " ".join(slipstream("run", "get", "demo").out.split())
    assert "data 1,993 of 2,000 records used, 7 dropped dropped 7: no turn of the assistant (a.jsonl:0, " in shown
    assert "a.jsonl:4, …)" in shown


def test_nothing_is_said_where_nothing_is_measured(desk: Desk, slipstream: Command) -> None:
    desk.beat(report=report(desk.running(), "RUNNING", checkpoints=[checkpoint(1)]))
    for command in (("run", "ls"), ("run", "get", "demo"), ("checkpoint", "ls", "demo")):
        shown = slipstream(*command).out
        assert "held out" not in shown.lower() and "best" not in shown.lower(), shown
