"""`slipstream run watch|logs|events` as processes: followed, left with Ctrl-C, ended by the run."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slipstream.cli.runs.figures import Telling
from tests.fakes.control_plane import Desk, record, report
from tests.fakes.processes import ManagedProcess
from tests.unit.cli.conftest import Command

Start = Callable[..., ManagedProcess]


@pytest.fixture
def start(desk: Desk) -> Iterator[Start]:
    """Starts `slipstream …` as a process of its own; what it prints is collected."""
    started: list[ManagedProcess] = []

    def command(*arguments: str) -> ManagedProcess:
        path = os.pathsep.join(filter(None, sys.path))
        argv = [sys.executable, "-m", "slipstream.cli", *arguments]
        started.append(ManagedProcess(argv, env={"PYTHONPATH": path, "TZ": "UTC"}))
        return started[-1]

    yield command
    for process in started:
        process.__exit__(None, None, None)


def train(desk: Desk, assignment: int, first: int, last: int, state: str = "RUNNING", **more: Any) -> None:
    """The trainer reports steps [first, last)."""
    metrics = {"first_index": first, "records": [record(step) for step in range(first, last)]}
    progress = {"step": last, "total_steps": 100}
    desk.beat(report=report(assignment, state, progress=progress, metrics=metrics, **more))


def log(desk: Desk, assignment: int, first: int, *lines: str) -> None:
    """The trainer sends lines of its log."""
    desk.beat(report=report(assignment, "RUNNING", logs={"first_line": first, "lines": list(lines)}))


# ---- watch


def test_watch_until_success(desk: Desk, start: Start) -> None:
    assignment = desk.running()
    watch = start("run", "watch", "demo", "--every", "0")
    watch.wait_for_line("^step 0/100")
    for first in range(0, 9, 3):
        train(desk, assignment, first, first + 3)
    watch.wait_for_line("^step 9/100")
    desk.verb("pause")
    watch.wait_for_line(r"^\d\d:\d\d:\d\d  PAUSING \(pause\)$")
    train(desk, assignment, 9, 100, "SUCCEEDED")
    assert watch.wait_exit() == 0
    steps = [line.split("/")[0] for line in watch.lines if line.startswith("step ")]
    assert steps == [f"step {step}" for step in range(101)] + ["step 100"], "each once, and the end"
    assert "demo SUCCEEDED" in watch.lines
    assert watch.lines[-1] == "next: slipstream checkpoint ls demo"
    assert "\x1b" not in watch.output, "no colours in a pipe"


@pytest.mark.parametrize(
    ("step", "words"),
    [(41, "goes on from step 41 (last checkpoint)"), (0, "begins again: there was no checkpoint yet")],
)
def test_watch_says_that_steps_are_trained_again(desk: Desk, start: Start, step: int, words: str) -> None:
    assignment = desk.running()
    train(desk, assignment, 0, 57)
    watch = start("run", "watch", "demo", "--every", "0")
    watch.wait_for_line("^step 57/100")
    again = [record(number, incarnation=2) for number in range(step, step + 3)]
    desk.beat(report=report(assignment, "RUNNING", metrics={"first_index": 57, "records": again}))
    watch.wait_for_line(f"^step {step + 3}/100")
    # A process that begins where the one before it ended has nothing to tell.
    more = [record(step + 3, incarnation=3)]
    desk.beat(report=report(assignment, "SUCCEEDED", metrics={"first_index": 60, "records": more}))
    assert watch.wait_exit() == 0
    told = watch.lines.index(words)
    assert watch.lines.count(words) == 1
    assert watch.lines[told + 1].startswith(f"step {step + 1}/100")
    assert not [line for line in watch.lines[told + 1 :] if "goes on from" in line or "begins again" in line]


@pytest.mark.parametrize(("state", "status"), [("STOPPED", 21), ("FAILED", 20)])
def test_watch_says_by_its_status_how_the_run_ended(desk: Desk, start: Start, state: str, status: int) -> None:
    assignment = desk.running()
    watch = start("run", "watch", "demo")
    watch.wait_for_line("^demo RUNNING")
    if state == "STOPPED":
        desk.verb("stop")
    ended = {"child": 1, "reason": "DISK_FULL", "message": "No room.", "remedy": "Free some.", "will_restart": False}
    train(desk, assignment, 0, 1, state, exit=ended if state == "FAILED" else None)
    assert watch.wait_exit() == status
    assert f"demo {state}" in watch.output
    assert ("DISK_FULL" in watch.output and "No room. Free some." in watch.output) == (state == "FAILED")
    assert watch.output.count("No room.") == (state == "FAILED"), "by its process, by the run and at the end: once"
    assert "next: slipstream run resume demo" in watch.lines


def test_watch_of_a_run_at_rest_ends_at_once(desk: Desk, slipstream: Command) -> None:
    desk.target()
    desk.run()
    desk.verb("stop")
    answer = slipstream("run", "watch", "demo")
    assert answer.status == 21
    assert answer.err == "next: slipstream run resume demo\n"


def test_watch_as_json(desk: Desk, start: Start) -> None:
    assignment = desk.running()
    watch = start("run", "watch", "demo", "-o", "json")
    watch.wait_for_line('"kind":"run"')
    train(desk, assignment, 0, 3)
    watch.wait_for_line('"step":2')
    train(desk, assignment, 3, 4, "SUCCEEDED")
    assert watch.wait_exit() == 0
    messages = [json.loads(line) for line in watch.lines]
    assert [one["data"]["step"] for one in messages if one["kind"] == "metric"] == [0, 1, 2, 3]
    assert (messages[0]["kind"], messages[-1]["kind"]) == ("run", "run")
    assert messages[-1]["data"]["state"] == "SUCCEEDED"


def test_ctrl_c_leaves_the_run_alone(desk: Desk, start: Start) -> None:
    assignment = desk.running()
    train(desk, assignment, 0, 42)
    watch = start("run", "watch", "demo")
    watch.wait_for_line("^step 42/100")
    os.kill(watch.pid, signal.SIGINT)
    assert watch.wait_exit() == 130
    assert watch.lines[-3:] == [
        "detached: run demo goes on (RUNNING, step 42/100)",
        "next: slipstream run watch demo",
        "next: slipstream run stop demo",
    ]
    assert desk.state() == "RUNNING"


def test_watch_on_a_terminal(desk: Desk) -> None:
    assignment = desk.running()
    ours, terminal = pty.openpty()
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "xterm", "COLUMNS": "100"}
    shown = Screen(ours)
    with subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", "run", "watch", "demo"],
        stdin=terminal, stdout=terminal, stderr=terminal, env=os.environ | environment,
    ) as watch:  # fmt: skip
        os.close(terminal)
        try:
            shown.wait_for("step 0/100")
            train(desk, assignment, 0, 42)
            shown.wait_for("step 42/100 (42.0%)")
            desk.verb("pause")
            shown.wait_for("PAUSING (pause)")
            shown.wait_for("PAUSING\x1b[0m")
            watch.send_signal(signal.SIGINT)
            shown.wait_for("next: slipstream run stop demo")
            assert watch.wait(30) == 130
        finally:
            # Else a failure would be waited for: a terminal that nobody reads any more holds its writer up.
            watch.kill()
    os.close(ours)
    assert "\x1b[?25l" in shown.text, "one line, written anew: the cursor is hidden"
    assert shown.text.rindex("\x1b[?25h") > shown.text.rindex("\x1b[?25l"), "and comes back"
    assert "detached: run demo goes on (PAUSING, step 42/100)" in shown.text


class Screen:
    """What a terminal was sent."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.text = ""

    def wait_for(self, words: str) -> None:
        """Read until they have come."""
        deadline = time.monotonic() + 40
        while words not in self.text:
            readable, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert readable and time.monotonic() < deadline, f"{words!r} has not come: {self.text!r}"
            self.text += os.read(self._descriptor, 4096).decode(errors="replace")


def test_watch_ends_with_the_run_that_is_deleted(desk: Desk, start: Start) -> None:
    desk.target()
    desk.run()
    desk.reconcile()
    watch = start("run", "watch", "demo")
    watch.wait_for_line("^demo PENDING")
    watch.wait_for_line("NO_TRAINER_FREE")
    desk.verb("stop")
    # It may leave for either reason, whichever it hears first.
    desk.client.delete("/v1/runs/demo")
    assert watch.wait_exit() in (13, 21)


def test_create_and_watch(desk: Desk, start: Start, tmp_path: Any) -> None:
    desk.target()
    (tmp_path / "a").touch()
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'name = "mine"\ntarget.model = "m"\ndata = {files = ["a"], pack_tokens = 128}\n'
        'train = {device = "cpu", attention = "sdpa", max_steps = 9}\n'
    )
    watch = start("run", "create", str(recipe), "--watch")
    watch.wait_for_line("^mine PENDING")
    desk.verb("stop", "mine")
    assert watch.wait_exit() == 21
    assert "STOPPED (stop)" in watch.output


# ---- logs and events


def test_logs(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    answer = slipstream("run", "logs", "demo")
    assert (answer.status, answer.out, answer.err.splitlines()[0]) == (0, "", "nothing was logged yet")
    log(desk, assignment, 0, "loading", "wärmt auf", "\x1b[2Jstep 1")
    answer = slipstream("run", "logs", "demo")
    assert answer.out.splitlines()[:2] == ["loading", "wärmt auf"]
    assert "\x1b" not in answer.out
    assert answer.err == "next: slipstream run logs demo -f\n"
    assert slipstream("run", "logs", "demo", "--tail", "2").out.splitlines()[0] == "wärmt auf"
    assert slipstream("run", "logs", "demo", "--tail", "0").out == ""
    lines = [json.loads(line) for line in slipstream("run", "logs", "demo", "-o", "json").out.splitlines()]
    assert [(one["number"], one["attempt"]) for one in lines] == [(0, 1), (1, 1), (2, 1)]


def test_logs_are_followed(desk: Desk, start: Start) -> None:
    assignment = desk.running()
    log(desk, assignment, 0, "old", "older than none")
    logs = start("run", "logs", "demo", "-f", "--tail", "1")
    logs.wait_for_line("^older than none$")
    log(desk, assignment, 2, "new")
    logs.wait_for_line("^new$")
    log(desk, assignment, 3, "newer")
    logs.wait_for_line("^newer$")
    os.kill(logs.pid, signal.SIGINT)
    assert logs.wait_exit() == 130
    assert [line for line in logs.lines if line] == [
        "older than none",
        "new",
        "newer",
        "no longer following; run demo is not touched by that",
    ]


def test_logs_are_followed_until_the_run_rests(desk: Desk, start: Start) -> None:
    assignment = desk.running()
    log(desk, assignment, 0, "first")
    logs = start("run", "logs", "demo", "-f")
    logs.wait_for_line("^first$")
    desk.verb("pause")
    desk.beat(report=report(assignment, "PAUSED", logs={"first_line": 1, "lines": ["saved"]}))
    logs.wait_for_line("^run demo is PAUSED; its log goes on when it is resumed$")
    desk.verb("resume")
    log(desk, assignment, 2, "resumed")
    logs.wait_for_line("^resumed$")
    last = [f"last {number}" for number in range(200)]
    desk.beat(report=report(assignment, "SUCCEEDED", logs={"first_line": 3, "lines": last}))
    assert logs.wait_exit() == 0
    assert logs.lines[-1] == "run demo is SUCCEEDED: this is the end of its log"
    assert [line for line in logs.lines if not line.startswith("run demo")] == ["first", "saved", "resumed", *last]
    again = start("run", "logs", "demo", "-f", "--tail", "1")
    assert again.wait_exit() == 0
    assert again.lines == ["last 199", "run demo is SUCCEEDED: this is the end of its log"]


def test_events(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    ended = {"child": 1, "message": "It was killed.", "will_restart": True}
    desk.beat(report=report(assignment, "STARTING", exit=ended))
    answer = slipstream("run", "events", "demo")
    assert answer.status == 0
    said = [line.split("  ", 1)[1] for line in answer.out.splitlines()]
    assert said[0] == "PENDING (create)"
    assert "TRAINER_ASSIGNED trainer=t1" in said
    assert "RUNNING (FIRST_STEP)" in said
    assert "t1: CHILD_DIED: It was killed." in said
    assert answer.err == "next: slipstream run events demo -f\n"
    assert len(slipstream("run", "events", "demo", "--tail", "1").out.splitlines()) == 1
    first = json.loads(slipstream("run", "events", "demo", "-o", "json").out.splitlines()[0])
    assert first["data"]["state"] == "PENDING"


def test_a_failure_is_told_once_and_every_try_by_itself(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    ended = {"reason": "INTERNAL", "message": "It was killed.", "remedy": ""}
    again = {"id": "e1", "type": "CHILD_STARTED", "message": "Process 2.", "time": "2026-01-01T00:00:00Z", "data": {}}
    desk.beat(report=report(assignment, "STARTING", exit=ended | {"child": 1, "will_restart": True}))
    desk.beat(report=report(assignment, "STARTING", events=[again]))
    desk.beat(report=report(assignment, "FAILED", exit=ended | {"child": 2, "will_restart": False}))
    said = [line.split("  ", 1)[1] for line in slipstream("run", "events", "demo").out.splitlines()]
    assert said.count("t1: CHILD_DIED: It was killed.") == 2, "of two processes"
    assert "FAILED (FATAL)" in said


def test_what_comes_again_is_told_again() -> None:
    changed = {"type": "CONDITION_CHANGED", "source": "control-api"}
    away = changed | {"message": "It does not answer.", "data": {"condition": "TARGET_UNREACHABLE", "holds": True}}
    back = changed | {"message": "", "data": {"condition": "TARGET_UNREACHABLE", "holds": False}}
    telling = Telling()
    said = [telling.event(one) for one in (away, back, away, away)]
    assert [words.count("It does not answer.") for words in said] == [1, 0, 1, 0]


def test_events_are_followed(desk: Desk, start: Start) -> None:
    desk.running()
    events = start("run", "events", "demo", "-f")
    events.wait_for_line("FIRST_STEP")
    desk.verb("pause")
    events.wait_for_line(r"PAUSING \(pause\)")
    desk.verb("stop")
    events.wait_for_line(r"STOPPING \(stop\)")
    os.kill(events.pid, signal.SIGINT)
    assert events.wait_exit() == 130
    assert len(set(events.lines)) == len(events.lines), "nothing twice"
