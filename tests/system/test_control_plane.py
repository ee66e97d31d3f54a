"""A control plane with everything real behind it: who works on what, and a target that goes away and comes back."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

from slipstream.control_client import ControlApiRefusalError, ControlClient
from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import stream_admin_service_pb2 as admin_pb
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import TargetClient
from tests.fakes.agent_stack import Stack, agent_stack
from tests.fakes.processes import ManagedProcess, Processes


class Watch:
    """The events of a run, read in their order by a thread and waited for."""

    _SECONDS = 100.0

    def __init__(self, stack: Stack, run: str) -> None:
        self._events: Queue[dict[str, Any]] = Queue()
        self._seen: list[str] = []
        self._client = ControlClient(stack.address)
        self._run = run
        threading.Thread(target=self._read, name=f"watch-{run}", daemon=True).start()

    def until(self, what: str, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next event that is it.

        Raises:
            AssertionError: it has not come in time; what came instead is in the message.
        """
        deadline = time.monotonic() + self._SECONDS
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise AssertionError(f"{self._run}: no {what}, but\n" + "\n".join(self._seen)) from None
            self._seen.append(f"{event['type']} {event['message']} {event['data']}")
            if is_it(event):
                return event

    def state(self, state: str) -> None:
        """Until the run is in this state."""
        self.until(state, lambda event: event["type"] == "STATE_CHANGED" and event["data"]["state"] == state)

    def condition(self, condition: str, *, holds: bool) -> str:
        """Until the condition came, or went; what it said."""
        data = {"condition": condition, "holds": holds}
        event = self.until(str(data), lambda event: event["type"] == "CONDITION_CHANGED" and event["data"] == data)
        return str(event["message"])

    def close(self) -> None:
        self._client.close()

    def _read(self) -> None:
        with suppress(SlipstreamError, RuntimeError):  # the test is over: the server, or the client, is closed
            for message in self._client.feed(self._run, patience=5.0):
                if message.kind == "event":
                    self._events.put(message.data)


@pytest.fixture
def watch() -> Iterator[Callable[[Stack, str], Watch]]:
    opened: list[Watch] = []

    def open_watch(stack: Stack, run: str) -> Watch:
        opened.append(Watch(stack, run))
        return opened[-1]

    yield open_watch
    for one in opened:
        one.close()


@pytest.fixture
def serve(processes: Processes, tiny_recipe: Path, tmp_path: Path) -> Callable[[int], tuple[ManagedProcess, str]]:
    """Starts a target server of this test's own, also again at the port it had."""

    def start(port: int = 0) -> tuple[ManagedProcess, str]:
        flags = ("--ledger", tmp_path / "ledger.sqlite", "--probe-bytes", "1MiB", "--subscription-timeout", "1")
        return processes.start_target_server(tiny_recipe, *flags, port=port)

    return start


def subscription_state(address: str, run: str) -> str:
    """OPEN, or why the target server has nothing to say about it."""
    with TargetClient(address) as client:
        try:
            client.get_stream_stats(admin_pb.GetStreamStatsRequest(subscription=f"subscriptions/{run}"))
        except SlipstreamError as error:
            return error.reason
    return "OPEN"


def refused(stack: Stack, path: str, body: dict[str, Any]) -> Reason:
    with pytest.raises(ControlApiRefusalError) as error:
        stack.client.post(path, body)
    return error.value.reason


def test_two_runs_two_trainers(
    processes: Processes,
    tiny_recipe: Path,
    tmp_path: Path,
    serve: Callable[..., tuple[ManagedProcess, str]],
    watch: Callable[[Stack, str], Watch],
) -> None:
    _, address = serve()
    with agent_stack(processes, tiny_recipe, address, tmp_path) as stack:
        stack.faults.hold(10)
        stack.faults.hold(7)
        stack.create("first", "train.max_steps=20", "checkpoint.every_steps=10")
        first = watch(stack, "first")
        assert first.condition("NO_TRAINER_FREE", holds=True) == "No trainer is free."
        stack.start_agent("one")
        first.state("STARTING")
        stack.faults.wait_until_held(10)
        first.state("RUNNING")

        # A held process trains on until its next checkpoint: that must not be the last one.
        stack.create("second", "train.max_steps=28", "checkpoint.every_steps=7", "train.seed=1")
        second = watch(stack, "second")
        second.condition("NO_TRAINER_FREE", holds=True)
        two = stack.start_agent("two")
        second.state("STARTING")
        stack.faults.wait_until_held(7)
        second.state("RUNNING")
        at_work = {one["name"]: (one["status"], one["run"]) for one in stack.client.listing("/v1/trainers")}
        assert at_work == {"one": ("BUSY", "first"), "two": ("BUSY", "second")}
        assert refused(stack, "/v1/trainers/two:attach", {"run": "first"}) is Reason.TRAINER_BUSY

        stack.client.post("/v1/trainers/two:detach")
        two.wait_for_line("child_asked_to_leave")
        stack.faults.let_go(7)
        second.state("PENDING")
        assert "was detached from second" in second.condition("NO_TRAINER_FREE", holds=True)
        assert refused(stack, "/v1/trainers/two:attach", {"run": "first"}) is Reason.RUN_HAS_TRAINER
        stack.client.post("/v1/trainers/two:attach", {"run": "second"})
        second.state("SUCCEEDED")
        assert stack.steps("second") == list(range(28)), "the second attempt went on where the first was"

        # While the first run is still at work on the same target.
        assert subscription_state(address, "second") == "OPEN"
        stack.client.delete("/v1/runs/second")
        stack.api.wait_for_line("subscriptions_closed target=local")
        assert subscription_state(address, "second") == Reason.STREAM_CLOSED
        assert subscription_state(address, "first") == "OPEN"
        stack.faults.let_go(10)
        first.state("SUCCEEDED")
        assert stack.steps("first") == list(range(20))


def test_a_target_that_goes_away_and_comes_back(
    processes: Processes,
    tiny_recipe: Path,
    tmp_path: Path,
    serve: Callable[..., tuple[ManagedProcess, str]],
    watch: Callable[[Stack, str], Watch],
) -> None:
    target, address = serve()
    with agent_stack(processes, tiny_recipe, address, tmp_path) as stack:
        stack.faults.hold(10)
        stack.faults.hold(20)
        # A held process trains on until its next checkpoint, and leaves with that: it must not be held there as well.
        stack.create("survivor", "train.max_steps=30", "checkpoint.every_steps=5")
        run = watch(stack, "survivor")
        agent = stack.start_agent()
        stack.faults.wait_until_held(10)
        run.state("RUNNING")

        target.kill()
        assert stack.client.post("/v1/targets/local:probe")["status"] == "UNREACHABLE"
        assert "does not answer" in run.condition("TARGET_UNREACHABLE", holds=True)
        # A verb needs no target.
        stack.verb("survivor", "pause")
        agent.wait_for_line("child_asked_to_leave")
        stack.faults.let_go(10)
        run.state("PAUSED")
        stack.verb("survivor", "resume")
        run.state("STARTING")

        _, again = serve(int(address.rpartition(":")[2]))
        assert again == address
        assert stack.client.post("/v1/targets/local:probe")["status"] == "REACHABLE"
        run.condition("TARGET_UNREACHABLE", holds=False)
        run.state("RUNNING")
        stack.faults.let_go(20)
        run.state("SUCCEEDED")
        assert stack.steps("survivor") == list(range(30)), "no step was lost, none was trained twice"
        history = [one["state"] for one in stack.client.get("/v1/runs/survivor")["history"]]
        assert history == [
            "PENDING", "STARTING", "RUNNING", "PAUSING", "PAUSED", "STARTING", "RUNNING", "SUCCEEDED"
        ]  # fmt: skip


def test_the_agent_of_the_only_trainer_that_can_hold_a_run_is_killed(
    processes: Processes,
    tiny_recipe: Path,
    tmp_path: Path,
    serve: Callable[..., tuple[ManagedProcess, str]],
    watch: Callable[[Stack, str], Watch],
) -> None:
    """No run goes to the free one beside it, where it would end with OUT_OF_MEMORY."""
    _, address = serve()
    with agent_stack(processes, tiny_recipe, address, tmp_path) as stack:
        # A held process trains on until its next checkpoint: that must not be the last one.
        stack.faults.hold(5)
        large = stack.start_agent("large")
        small = stack.start_agent("small", mebibytes=256)
        stack.create("taken", "train.max_steps=20", "checkpoint.every_steps=5")
        taken = watch(stack, "taken")
        stack.faults.wait_until_held(5)
        taken.state("RUNNING")
        stack.create("waits", "train.max_steps=4")
        waits = watch(stack, "waits")
        free = waits.condition("NO_TRAINER_FREE", holds=True)
        assert free.startswith("Waits for large (has run taken). The run needs "), free
        assert free.endswith("the CPU of trainer small has 256 MiB."), free

        large.kill()
        stack.faults.let_go(5)
        lost = taken.condition("TRAINER_LOST", holds=True)
        assert lost.startswith("Nothing is heard of large. The run needs ") and "trainer small has 256 MiB" in lost
        fits = waits.condition("NO_TRAINER_FITS", holds=True)
        assert fits.endswith("Start large again, which could and is not there."), fits
        stack.start_agent("large")
        taken.state("SUCCEEDED")
        waits.state("STARTING")
        assert stack.steps("taken") == list(range(20)), "a step was lost, or trained twice"
        for run in ("taken", "waits"):
            assert {one["data"]["trainer"] for one in stack.events(run, "TRAINER_ASSIGNED")} == {"large"}
        assert "child_started" not in small.output
