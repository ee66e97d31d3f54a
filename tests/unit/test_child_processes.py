"""What a program started ends with it, also when it is killed and can no longer say so."""

import signal
import subprocess
import sys

import pytest

from slipstream.child_processes import child_process, end_process, exit_status
from tests.fakes.process_group import survivors
from tests.fakes.processes import ManagedProcess

CHILD = """
import signal, sys, time
from slipstream.child_processes import sigterm_as_exit
from slipstream.entrypoint import run_main

def wait() -> int:
    try:
        with sigterm_as_exit():
            print("child waits", flush=True)
            time.sleep(600)
    finally:
        print("child has cleaned up", flush=True)

sys.exit(run_main("child", wait))
"""
PARENT = """
import sys
from slipstream.child_processes import child_process, exit_status, sigterm_as_exit

with sigterm_as_exit(), child_process([sys.executable, "-c", sys.argv[1]]) as child:
    exit_status(child)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_leaves_in_order_with_its_parent(how: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    with ManagedProcess([sys.executable, "-P", "-c", PARENT, CHILD]) as parent:
        parent.wait_for_line("child waits")
        parent.kill() if how is signal.SIGKILL else parent.terminate()
        # Collected until the last process that can write has ended.
        parent.wait_for_line("child has cleaned up")
        assert not survivors(parent.pid, seconds=60)


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_status_is_a_shells(code: str, status: int) -> None:
    with child_process([sys.executable, "-c", code]) as child:
        assert exit_status(child) == status
        assert exit_status(child) == status, "asked once more"
    assert child.returncode is not None, "nothing of it is left in the system's table"


def test_a_lock_that_an_exception_left_behind_stops_nobody() -> None:
    """A handler may raise within `Popen.wait`, right after it took its lock: nobody gives that back."""
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    ended._waitpid_lock.acquire()  # type: ignore[attr-defined]
    assert exit_status(ended) == 7
    waits = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    waits._waitpid_lock.acquire()  # type: ignore[attr-defined]
    end_process(waits)
    assert exit_status(waits) == 128 + signal.SIGTERM
    for process in (ended, waits):
        process._waitpid_lock.release()  # type: ignore[attr-defined]
        process.wait()
