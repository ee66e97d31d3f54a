"""The end of a stack, in order: trainers first, so that they save; then the target server; then the control API."""

import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from slipstream.launcher.home import Home, is_held
from slipstream.launcher.liveness import Handle, holders, marked, open_handles
from slipstream.launcher.stack import API, TARGET

_GRACE_SECONDS = {TARGET: 45.0, API: 20.0}
TRAINER_GRACE_SECONDS = 200.0
"""Longer than an agent gives its training process to save."""
_STRAY_GRACE_SECONDS = 30.0
_KILLED_SECONDS = 10.0
_LOOK_SECONDS = 0.2


class Endable(Protocol):
    """What can be asked to end."""

    @property
    def name(self) -> str:
        """Of the process."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""

    def ended(self, seconds: float) -> bool:
        """Wait for the end for so long."""


class Leftover:
    """A process that a supervisor started which is no more."""

    def __init__(self, name: str, handles: Sequence[Handle]) -> None:
        self.name = name
        self._handles = list(handles)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        for handle in self._handles:
            handle.send(number)

    def ended(self, seconds: float) -> bool:
        """Wait for the end for so long."""
        deadline = time.monotonic() + seconds
        for handle in list(self._handles):
            if handle.has_ended(max(0.0, deadline - time.monotonic())):
                handle.close()
                self._handles.remove(handle)
        return not self._handles


def found_alive(home: Home, say: Callable[[str], None]) -> list[Leftover]:
    """The processes of a home that are alive. Only for who holds supervisor.lock."""
    found = []
    for lock in sorted(home.locks.glob("*.lock")):
        if is_held(lock):
            handles = open_handles(holders(lock))
            if handles:
                found.append(Leftover(lock.stem, handles))
            elif is_held(lock):
                say(f"{lock.stem}: is alive, but this user cannot see it")
    return found


def end_in_order(processes: Sequence[Endable], *, say: Callable[[str], None], hurry: Callable[[], bool]) -> None:
    """Ask processes to end, group by group, and wait for it; kill those that do not end in time, or all in a hurry.

    Args:
        processes: of one stack, in any order.
        say: takes sentences about what happens.
        hurry: whether nobody wants to wait any longer.
    """
    trainers = [process for process in processes if process.name not in (TARGET, API)]
    target = [process for process in processes if process.name == TARGET]
    api = [process for process in processes if process.name == API]
    for group in (trainers, target, api):
        _end_group([process for process in group if not process.ended(0.0)], say, hurry)


def end_strays(home: Home, *, say: Callable[[str], None], hurry: Callable[[], bool]) -> bool:
    """End what processes of a stack started and left behind, such as the training process of an agent that was killed.

    Returns:
        True when nothing of the home runs any more.
    """
    strays = [Leftover(f"process {handle.pid}", [handle]) for handle in open_handles(marked(home.root))]
    _end_group(strays, say, hurry, what="left behind", grace=_STRAY_GRACE_SECONDS)
    return not marked(home.root)


def _end_group(
    group: Sequence[Endable],
    say: Callable[[str], None],
    hurry: Callable[[], bool],
    *,
    what: str = "stops",
    grace: float | None = None,
) -> None:
    """`grace`: seconds; None: what a process of this name needs."""
    for process in group:
        say(f"{process.name}: {what}")
        process.signal(signal.SIGTERM)
    started = time.monotonic()
    for process in group:
        seconds = grace or _GRACE_SECONDS.get(process.name, TRAINER_GRACE_SECONDS)
        while not process.ended(_LOOK_SECONDS):
            if hurry() or time.monotonic() - started > seconds:
                say(f"{process.name}: killed{'' if hurry() else f', it did not end within {seconds:g} s'}")
                process.signal(signal.SIGKILL)
                process.ended(_KILLED_SECONDS)
                break
