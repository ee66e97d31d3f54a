"""Faults at an exact step, inside a real training process: Python imports this at its start where it is on the path.

`$SLIPSTREAM_TEST_FAULTS` is a directory. A training process that is about to save the checkpoint of step 10 looks for

    kill-10   it removes the file and kills itself
    hold-10   it makes `at-10`, and waits until `hold-10` has been removed

and one that starts, for `kill-start`.

`$SLIPSTREAM_TEST_CGROUP` is a control group of version 2, or a directory with its files: the container that agent and
training process find themselves in.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

_FAULTS = os.environ.get("SLIPSTREAM_TEST_FAULTS")
_UNFINISHED = re.compile(r"\.unfinished-step-0*(\d+)\.\d+$")


def _die() -> None:
    sys.stderr.write("killed by a fault\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "os.mkdir":
        return
    found = _UNFINISHED.search(str(arguments[0]))
    if found is None:
        return
    faults, step = Path(str(_FAULTS)), found[1]
    if (faults / f"kill-{step}").exists():
        (faults / f"kill-{step}").unlink()
        _die()
    if (faults / f"hold-{step}").exists():
        (faults / f"at-{step}").touch()
        while (faults / f"hold-{step}").exists():
            time.sleep(0.02)


if group := os.environ.get("SLIPSTREAM_TEST_CGROUP"):
    from slipstream import machine_probe

    machine_probe._CGROUP = Path(group)

if _FAULTS and "--agent-fd" in sys.orig_argv:
    if (Path(_FAULTS) / "kill-start").exists():
        _die()
    sys.addaudithook(_hook)
