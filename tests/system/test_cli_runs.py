"""The client and the command line in front of a control API that is killed meanwhile."""

import threading
from pathlib import Path
from typing import Any

import pytest

from slipstream.control_client import ControlClient, FeedMessage
from tests.fakes.control_plane import SPEC, record, registration, report
from tests.fakes.processes import ADDRESS, ManagedProcess, Processes


class Api:
    """A control API as a process that can be killed and comes back, with one run whose trainer is the test."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self._processes = processes
        self._database = directory / "control.sqlite"
        self.environment = {"SLIPSTREAM_HOME": str(directory / "home"), "SLIPSTREAM_TOKEN": ""}
        self._process, self.address = self._start(0)
        self.environment["SLIPSTREAM_API"] = self.address
        self.client = ControlClient(self.address)
        self.client.post("/v1/targets", {"name": "local", "address": "127.0.0.1:1"})
        self.client.post("/v1/runs", {"spec": SPEC})
        self.client.post("/v1/trainers", registration("t1"))
        # No target answers here, so nobody is given the run but by hand.
        self.client.post("/v1/trainers/t1:attach", {"run": "demo"})

    def _start(self, port: int) -> tuple[ManagedProcess, str]:
        flags = ("--listen", f"127.0.0.1:{port}", "--database", f"sqlite:///{self._database}")
        process = self._processes.start("control_api.cli", *flags)
        return process, process.wait_for_line(ADDRESS).group(1)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def start_again(self) -> None:
        """At the same address."""
        self._process, _ = self._start(int(self.address.rpartition(":")[2]))

    def beat(self, state: str, **more: Any) -> dict[str, Any]:
        """A heartbeat of the only trainer."""
        body = {"instance_id": "t1-1", "report": report(1, state, **more)}
        return self.client.post_once("/v1/trainers/t1:heartbeat", body)

    def train(self, first: int, last: int, state: str = "RUNNING") -> None:
        """The trainer reports steps [first, last)."""
        metrics = {"first_index": first, "records": [record(step) for step in range(first, last)]}
        self.beat(state, metrics=metrics, progress={"step": last, "total_steps": 100})

    def slipstream(self, *arguments: str) -> ManagedProcess:
        """The command line, in front of this API."""
        return self._processes.start("slipstream.cli", *arguments, env=self.environment)


@pytest.fixture
def api(processes: Processes, tmp_path: Path) -> Api:
    return Api(processes, tmp_path)


class Reader:
    """Reads a feed in a thread of its own."""

    def __init__(self, address: str) -> None:
        self.messages: list[FeedMessage] = []
        self.losses: list[str] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(address,), daemon=True)
        self._thread.start()

    def _read(self, address: str) -> None:
        with ControlClient(address) as client:
            for message in client.feed("demo", on_loss=lambda why: self.losses.append(why.message)):
                with self._changed:
                    self.messages.append(message)
                    self._changed.notify_all()

    def steps(self) -> list[int]:
        return [message.data["step"] for message in self.messages if message.kind == "metric"]

    def wait_for_step(self, step: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: step in self.steps(), timeout=60), self.steps()

    def wait_for_end(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_a_feed_misses_nothing_when_the_api_is_killed(api: Api) -> None:
    reader = Reader(api.address)
    api.train(0, 30)
    reader.wait_for_step(29)
    for first in (30, 60):
        api.kill()
        api.start_again()
        api.train(first, first + 30)
        reader.wait_for_step(first + 29)
    api.client.post("/v1/runs/demo:stop")
    api.train(90, 95, "STOPPED")
    reader.wait_for_step(94)
    api.client.delete("/v1/runs/demo")
    reader.wait_for_end()
    assert reader.steps() == list(range(95)), "nothing missing, nothing twice"
    events = [message.data["id"] for message in reader.messages if message.kind == "event"]
    assert events == sorted(set(events))
    states = [one.data["data"].get("state") for one in reader.messages if one.kind == "event"]
    assert [state for state in states if state] == ["PENDING", "STARTING", "RUNNING", "STOPPING", "STOPPED"]
    assert reader.messages[-1].kind == "deleted"
    assert len(reader.losses) == 2


def test_watched_and_paused_over_a_restart_of_the_api(api: Api) -> None:
    watch = api.slipstream("run", "watch", "demo", "--every", "0")
    logs = api.slipstream("run", "logs", "demo", "-f")
    watch.wait_for_line("^demo STARTING")
    api.train(0, 10)
    api.beat("RUNNING", logs={"first_line": 0, "lines": ["warmed up", "first step"]})
    watch.wait_for_line("^step 10/100")
    logs.wait_for_line("^first step$")
    api.kill()
    watch.wait_for_line("^connection lost: no control API answers at .*; trying again$")
    logs.wait_for_line("^connection lost")
    api.start_again()
    api.train(10, 20)
    watch.wait_for_line("^step 20/100")
    pause = api.slipstream("run", "pause", "demo", "--wait")
    watch.wait_for_line(r"PAUSING \(pause\)$")
    api.beat("PAUSED")
    assert pause.wait_exit() == 0
    assert "demo PAUSED" in pause.lines
    assert api.slipstream("run", "resume", "demo").wait_exit() == 0
    api.beat("RUNNING", logs={"first_line": 2, "lines": ["resumed"]})
    logs.wait_for_line("^resumed$")
    api.train(20, 100, "SUCCEEDED")
    assert watch.wait_exit() == 0
    shown = [line.split("/")[0] for line in watch.lines if line.startswith("step ")]
    assert [shown.count(f"step {step}") for step in range(1, 100)] == [1] * 99
    assert logs.wait_exit() == 0
    said = [line for line in logs.lines if not line.startswith(("connection", "run demo is "))]
    assert said == ["warmed up", "first step", "resumed"]
    assert logs.lines[-1] == "run demo is SUCCEEDED: this is the end of its log"
