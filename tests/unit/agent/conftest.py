"""An assignment and a place to work on it, with training processes that are small programs of a test."""

import select
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drafter_trainer.agent.assignment import Assignment
from drafter_trainer.agent.child import ChildSlot
from drafter_trainer.agent.devices import TrainerDevice
from drafter_trainer.agent.work import Work, Workplace
from slipstream.run_spec.states import DesiredState
from tests.fakes.control_plane import SPEC

PROGRAM = """
import json, os, signal, sys, threading, time
from pathlib import Path
from drafter_trainer.agent_line import AgentLine
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

definition, run = Path(sys.argv[2]), Path(sys.argv[sys.argv.index("--run-dir") + 1])
line = AgentLine(int(sys.argv[sys.argv.index("--agent-fd") + 1]))

def record(step):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "incarnation": 1}) + "\\n")

def until(name):
    while not (run / name).exists():
        time.sleep(0.01)
"""


def assignment(state: str = "RUNNING", **changes: object) -> Assignment:
    """As an answer names it."""
    fields = {
        "id": 17,
        "run": "demo",
        "run_uid": "5a",
        "attempt": 2,
        "desired_state": DesiredState(state),
        "directory": "demo",
        "spec": SPEC,
        "target": "127.0.0.1:1",
        "next_metric_index": 0,
        "next_log_line": 0,
    }
    return Assignment(**fields | changes)  # type: ignore[arg-type]


class Bench:
    """One assignment at work, with a clock that the test turns."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run = directory / "runs" / "demo"
        self.script = directory / "child.py"
        (directory / "state").mkdir()
        self.slot = self.new_slot()
        self.now = 100.0
        self.leaving = False
        self.work = Work(assignment(), self.place())

    def new_slot(self) -> ChildSlot:
        """As of an agent that was started again."""
        return ChildSlot(self.directory / "state", {"CUDA_VISIBLE_DEVICES": ""}, (str(self.script),))

    def place(self, device: str = "cpu") -> Workplace:
        """For the work."""
        return Workplace(self.directory / "runs", self.slot, TrainerDevice(device), threads=1)

    def child(self, body: str) -> None:
        """What a training process does."""
        self.script.write_text(PROGRAM + body)

    def desire(self, state: str) -> None:
        """The control API wants something else now."""
        self.work.assignment = assignment(state)

    def signal(self, name: str) -> None:
        """Let a process go on that waits with `until(name)`."""
        (self.run / name).touch()

    def advance(self) -> bool:
        """Once, at the test's time."""
        return self.work.advance(self.now, leaving=self.leaving)

    def until(self, condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
        """Advance until it holds."""
        deadline = time.monotonic() + seconds
        while True:
            self.advance()
            if condition():
                return
            assert time.monotonic() < deadline, f"{self.work.standing}: {self.log}"
            select.select([], [], [], 0.01)

    def until_state(self, state: str) -> None:
        """Advance until the work stands so."""
        self.until(lambda: self.work.standing.state == state)

    @property
    def log(self) -> str:
        """Of the attempt."""
        path = self.run / "logs" / "attempt-0002.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
