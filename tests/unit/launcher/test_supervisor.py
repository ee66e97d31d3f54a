"""The supervisor with a real control API: one that hangs, and a home that cannot be written."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.launcher import readiness, supervisor
from slipstream.launcher.home import Home, SupervisorState, read_supervisor
from slipstream.launcher.liveness import marked
from slipstream.launcher.planning import choose_address
from slipstream.launcher.stack import ApiPart, write_stack
from slipstream.launcher.supervisor import Supervisor
from tests.unit.launcher.stacks import a_stack

_SECONDS = 60.0


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """With a stack of a control API alone."""
    made = Home(tmp_path / "home")
    made.make()
    address = choose_address("127.0.0.1:0", None)
    write_stack(made.root, a_stack(api=ApiPart(listen=address, address=address), target=None, trainers=()))
    return made


def run(home: Home, on_state: Callable[[SupervisorState], None] = lambda _state: None) -> list[str]:
    """Until a signal; what was said."""
    said: list[str] = []
    too_late = threading.Timer(_SECONDS, os.kill, (os.getpid(), signal.SIGTERM))
    too_late.start()
    try:
        Supervisor(home.root, say=said.append, on_state=on_state).run()
    finally:
        too_late.cancel()
        assert marked(home.root) == [], "nothing is left running"
    return said


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_control_api_that_hangs_is_started_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "_HUNG_CHECKS", 2)
    monkeypatch.setattr(readiness, "_SECONDS", 0.5)
    hung: list[int] = []

    def on_state(state: SupervisorState) -> None:
        (api,) = state.processes
        if api.state == "READY" and not hung:
            assert api.pid is not None
            hung.append(api.pid)
            os.kill(api.pid, signal.SIGSTOP)
        elif api.state == "READY" and api.pid != hung[0]:
            stop()

    said = run(home, on_state)
    assert "control-api: killed, it has not answered 2 times in a row" in said
    assert said.count("control-api: ready") >= 2, said


def test_a_home_that_cannot_be_written_leaves_nobody_running(home: Home) -> None:
    home.supervisor_file.mkdir()
    (home.supervisor_file / "in-the-way").touch()
    with pytest.raises(SlipstreamError, match=r"supervisor\.json could not be written"):
        run(home)


def test_what_could_not_be_written_is_written_later(home: Home) -> None:
    def let_it_be_written() -> None:
        home.supervisor_file.rmdir()
        deadline = time.monotonic() + _SECONDS
        while (now := read_supervisor(home.root)) is None or now.state != "READY":
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        written.set()
        stop()

    written = threading.Event()

    def on_state(state: SupervisorState) -> None:
        if state.state == "STARTING" and home.supervisor_file.is_file():
            home.supervisor_file.unlink()
            home.supervisor_file.mkdir()
        elif state.state == "READY":
            threading.Thread(target=let_it_be_written, daemon=True).start()

    run(home, on_state)
    assert written.is_set()
