"""Signals as something to wait for: SIGTERM and SIGINT ask the agent to leave, SIGCHLD says that a process ended."""

import select
import signal
import socket
from contextlib import suppress
from types import FrameType
from typing import Protocol


class HasFileno(Protocol):
    """Something that can be waited for."""

    def fileno(self) -> int:
        """File descriptor."""


class Signals:
    """A context, in the main thread. The second SIGTERM or SIGINT raises SystemExit there."""

    def __init__(self) -> None:
        self.leave = False
        """The agent was asked to leave."""
        self._previous: dict[int, object] = {}

    def wait(self, seconds: float, *others: HasFileno) -> None:
        """Until a signal comes, one of the others has something to read, or so much time has gone by."""
        select.select([self._ours, *others], [], [], max(0.0, seconds))
        with suppress(BlockingIOError):
            while self._ours.recv(4096):
                pass

    def __enter__(self) -> "Signals":
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        # A signal that comes between a look at `leave` and the wait ends the wait: it is written here.
        self._previous_fd = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._asked)
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        return self

    def __exit__(self, *_exception: object) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._ours.close()
        self._theirs.close()

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        if self.leave:
            raise SystemExit(128 + number)
        self.leave = True
