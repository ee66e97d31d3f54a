"""What is said of an assignment, how often, and when the last word is spoken."""

import json
from pathlib import Path
from typing import Any

import pytest

from drafter_trainer.agent.assignment import Assignment
from drafter_trainer.agent.reports import Reporter, Standing, exit_report
from drafter_trainer.agent.restarts import Failure
from drafter_trainer.agent.run_files import MAX_LINES, RunFiles
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from tests.fakes.control_plane import SPEC, record
from tests.unit.agent.conftest import assignment

RUNNING = Standing("RUNNING")
FAILED = Standing(
    "FAILED", exit=exit_report(Failure(Reason.DISK_FULL, "Full."), child=1, log_tail=[], will_restart=False)
)


class Heard:
    """A reporter, and a control API that counts as the real one does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "logs").mkdir()
        self.reporter = Reporter(assignment(), RunFiles(directory, attempt=2))
        self.metrics: list[int] = []
        self.lines: list[str] = []

    def train(self, *steps: int) -> None:
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(record(step)) + "\n" for step in steps)

    def log(self, *lines: str) -> None:
        with (self.directory / "logs" / "attempt-0002.log").open("a") as file:
            file.writelines(line + "\n" for line in lines)

    def say(self, standing: Standing) -> dict[str, Any]:
        """Build a report and have it answered."""
        report = self.reporter.build(standing)
        metrics, logs = report.get("metrics"), report.get("logs")
        if metrics and metrics["first_index"] <= len(self.metrics):
            self.metrics += [one["step"] for one in metrics["records"][len(self.metrics) - metrics["first_index"] :]]
        if logs:
            self.lines += logs["lines"][max(0, len(self.lines) - logs["first_line"]) :]
        self.reporter.answered({"next_metric_index": len(self.metrics), "next_log_line": len(self.lines)})
        return report


@pytest.fixture
def heard(tmp_path: Path) -> Heard:
    return Heard(tmp_path)


def test_everything_is_said_once(heard: Heard) -> None:
    heard.train(0, 1)
    heard.log("a", "b")
    first = heard.say(Standing("RUNNING", total_steps=9))
    assert first["progress"] == {"step": 2, "total_steps": 9}
    heard.train(2)
    second = heard.say(RUNNING)
    assert second["metrics"]["first_index"] == 2 and "logs" not in second
    assert "metrics" not in heard.say(RUNNING)
    assert (heard.metrics, heard.lines) == ([0, 1, 2], ["a", "b"])


def test_what_was_not_answered_is_said_again(heard: Heard) -> None:
    heard.train(0)
    heard.log("a")
    heard.reporter.add_event("CHILD_STARTED", "One.", {})
    unheard = heard.reporter.build(RUNNING)
    heard.train(1)
    again = heard.say(RUNNING)
    assert unheard["events"] == again["events"] and len(again["metrics"]["records"]) == 2
    assert heard.say(RUNNING)["events"] == []
    assert (heard.metrics, heard.lines) == ([0, 1], ["a"])


def test_a_control_api_that_knows_less_or_more_than_before(heard: Heard) -> None:
    heard.train(*range(5))
    heard.say(RUNNING)
    del heard.metrics[2:]  # another database
    heard.reporter.answered({"next_metric_index": 2, "next_log_line": 0})
    assert heard.say(RUNNING)["metrics"]["first_index"] == 2
    heard.reporter.answered({"next_metric_index": 9, "next_log_line": 4})
    assert "metrics" not in heard.reporter.build(RUNNING)
    assert heard.metrics == list(range(5))


def test_the_last_word_comes_with_the_end_of_the_files(heard: Heard) -> None:
    heard.train(*range(2 * MAX_LINES + 1))
    heard.log(*(f"line {number}" for number in range(MAX_LINES + 1)))
    heard.say(RUNNING)
    states = []
    while not heard.reporter.all_is_said:
        states.append(heard.say(FAILED)["state"])
        assert heard.reporter.has_more == (states[-1] == "RUNNING")
    assert states == ["RUNNING", "FAILED"]
    assert heard.metrics == list(range(2 * MAX_LINES + 1)) and len(heard.lines) == MAX_LINES + 1
    assert heard.reporter.heard_state == "FAILED"


def test_the_last_word_is_repeated_while_a_metric_is_missing(heard: Heard) -> None:
    heard.train(0, 1)
    heard.reporter.build(FAILED)
    heard.reporter.answered({"next_metric_index": 1, "next_log_line": 0})
    assert not heard.reporter.all_is_said and heard.reporter.has_more
    assert heard.reporter.build(FAILED)["metrics"]["first_index"] == 1
    heard.reporter.answered({"next_metric_index": 2, "next_log_line": 0})
    assert heard.reporter.all_is_said


def test_a_run_that_is_gone_needs_no_last_word(heard: Heard) -> None:
    heard.train(0)
    heard.reporter.build(RUNNING)
    heard.reporter.answered(None)
    assert heard.reporter.all_is_said


def test_checkpoints_are_listed_when_they_change(heard: Heard) -> None:
    assert heard.say(RUNNING)["checkpoints"] == [], "the first report of a process holds the list in any case"
    assert heard.say(RUNNING)["checkpoints"] is None
    directory = heard.directory / "checkpoints" / "step-00000005"
    directory.mkdir(parents=True)
    (directory / "state.json").write_text('{"incarnation": 1, "cursor": {"next_step": 5}}')
    (directory / "manifest.json").write_text("{}")
    unheard = heard.reporter.build(RUNNING)["checkpoints"]
    assert unheard and unheard == heard.say(RUNNING)["checkpoints"]
    assert heard.say(RUNNING)["checkpoints"] is None


def test_many_events_take_several_heartbeats(heard: Heard) -> None:
    for number in range(150):
        heard.reporter.add_event("CHILD_STARTED", str(number), {"child": number})
    said = [event["message"] for _ in range(2) for event in heard.say(FAILED)["events"]]
    assert said == [str(number) for number in range(150)]
    assert heard.reporter.all_is_said


@pytest.mark.parametrize(
    "changes", [{"directory": "../x"}, {"directory": ""}, {"desired_state": "DANCING"}, {"target": 1}]
)
def test_answers_that_cannot_be_understood(changes: dict[str, object]) -> None:
    fields = {
        "id": 1,
        "run": "demo",
        "attempt": 1,
        "desired_state": "RUNNING",
        "directory": "demo",
        "spec": SPEC,
        "target": {"name": "local", "address": "h:1"},
        "next_metric_index": 0,
        "next_log_line": 0,
        "of_a_newer_version": True,
    }
    assert Assignment.from_answer(fields).target == "h:1"
    for broken in (fields | changes, {key: value for key, value in fields.items() if key != "spec"}):
        with pytest.raises(SlipstreamError) as caught:
            Assignment.from_answer(broken)
        assert caught.value.reason is Reason.PROTOCOL_MISMATCH
