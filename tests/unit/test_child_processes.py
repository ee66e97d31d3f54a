"""What a program started ends with it, also when it is killed and can no longer say so."""

import signal
import sys

import pytest

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
