"""The compose stack, built and run with podman: a run by REST to its end, stopped and taken down in the middle.

Building takes minutes and gigabytes, so it is asked for: SLIPSTREAM_TEST_STACK=1. Skipped, in words, where podman or
anything else that deploy/stack_with_podman.py needs is missing.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from slipstream.control_client import ControlClient, FeedMessage
from tests.conftest import ROOT

PROJECT = "slipstream-test"
STEPS = 80
EVERY = 5
PATIENCE = 300.0


def stack(*arguments: str, port: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "deploy/stack_with_podman.py"), "--project", PROJECT, *arguments]
    environment = os.environ | {"SLIPSTREAM_PORT": str(port)}
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def why_not() -> str | None:
    if os.environ.get("SLIPSTREAM_TEST_STACK") != "1":
        return "builds two images, minutes and gigabytes: asked for with SLIPSTREAM_TEST_STACK=1"
    check = stack("check")
    return check.stdout.strip() if check.returncode != 0 else None


REASON = why_not()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=REASON or ""), pytest.mark.timeout(3600)]


class Stack:
    """The stack, from nothing to nothing."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def __call__(self, *arguments: str) -> None:
        """Run one command of the script.

        Raises:
            AssertionError: it failed; the message holds what it said.
        """
        done = stack(*arguments, port=self.port)
        assert done.returncode == 0, f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}"
        sys.stdout.write(done.stdout)  # seconds, for whoever asks pytest for it

    def run_inside(self, *command: str) -> str:
        """A command in the container of the control API; only what it printed itself."""
        container = f"{PROJECT}_control-api_1"
        return subprocess.check_output(["podman", "exec", container, *command], text=True, stderr=subprocess.DEVNULL)

    def client(self) -> ControlClient:
        return ControlClient(f"http://127.0.0.1:{self.port}", self.run_inside("cat", "/run/slipstream/token").strip())


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    started = Stack()
    started("build")
    try:
        started("up")
        yield started
    finally:
        started("down", "--volumes")


def until_step(feed: Iterator[FeedMessage], step: int) -> None:
    for message in feed:
        if message.kind == "metric" and message.data["step"] >= step:
            return
        assert state_of(message) not in ("FAILED", "SUCCEEDED"), message.data


def until_it_rests(feed: Iterator[FeedMessage]) -> str:
    return next(state for message in feed if (state := state_of(message)) in ("FAILED", "STOPPED", "SUCCEEDED"))


def state_of(message: FeedMessage) -> str:
    """The run's new state, if the message tells of one."""
    return str(message.data["data"].get("state", "")) if message.kind == "event" else ""


def test_a_run_survives_stop_and_down(running: Stack) -> None:
    """Stopped in order, it is saved; taken down, its volumes stay: each time it goes on where it was."""
    overrides = [f"train.max_steps={STEPS}", f"checkpoint.every_steps={EVERY}", "stream.transport=shm"]
    with running.client() as client:
        recipe = next(each for each in client.get("/v1/recipes")["recipes"] if each["name"] == "demo-smollm2-135m")
        run = client.post("/v1/runs", {"recipe": recipe["text"], "overrides": overrides})["name"]
        feed = client.feed(run, patience=PATIENCE)
        until_step(feed, 8)

        running("compose", "stop")
        running("compose", "start")
        running("ready")
        until_step(feed, 30)

        running("down")
        running("up")
        assert until_it_rests(feed) == "SUCCEEDED"

        steps = [record["step"] for record in client.listing(f"/v1/runs/{run}/metrics")]
        assert sorted(set(steps)) == list(range(STEPS))
        logs = [line["text"] for line in client.listing(f"/v1/runs/{run}/logs")]
    assert sum("transport_chosen transport=shm" in line for line in logs) >= 3
    listed = json.loads(running.run_inside("slipstream", "run", "get", run, "-o", "json"))
    assert listed["state"] == "SUCCEEDED"


def test_nobody_has_more_than_it_needs(running: Stack) -> None:
    identity = running.run_inside("sh", "-c", "id -u; stat -c %a /run/slipstream/token; touch /x 2>/dev/null; echo $?")
    assert identity.split() == ["10001", "600", "1"]
    bounding = next(
        line for line in running.run_inside("cat", "/proc/self/status").splitlines() if line.startswith("CapBnd")
    )
    assert int(bounding.split()[1], 16) == 0
