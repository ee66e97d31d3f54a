"""Which processes of a home are alive, known for sure after any kill: each inherits a lock when it starts.

A process id alone says little: the supervisor that knew it may have been killed, and the number may be another's now.
The kernel gives the lock back when the process is gone, and never before.
"""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "SLIPSTREAM_STACK"
"""Variable that every process of a stack and its descendants have: NAME@HOME."""


def holders(lock: Path) -> list[int]:
    """Ids of the other processes that have the lock file open, oldest first."""
    try:
        wanted = lock.stat()
    except FileNotFoundError:
        return []
    return [pid for pid in _others() if _has_open(pid, (wanted.st_dev, wanted.st_ino))]


def marked(home: Path) -> list[int]:
    """Ids of the other processes that a stack of this home started, and of all that these started, oldest first."""
    mark = f"@{home}".encode()
    found = []
    for pid in _others():
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(variable.startswith(MARK.encode() + b"=") and variable.endswith(mark) for variable in variables):
                found.append(pid)
    return found


class Handle:
    """A process that need not be a child of this one. Its number cannot become another's while the handle is open."""

    def __init__(self, pid: int) -> None:
        """Open it.

        Raises:
            ProcessLookupError: it is gone.
        """
        self.pid = pid
        self.descriptor = os.pidfd_open(pid)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Wait for the end for so long."""
        return wait_for_any([self.descriptor], seconds)

    def send(self, number: signal.Signals) -> None:
        """Send a signal; one that has ended ignores it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, number)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.descriptor)


def open_handles(pids: list[int]) -> list[Handle]:
    """Handles of those that are still there."""
    found = []
    for pid in pids:
        with suppress(ProcessLookupError):
            found.append(Handle(pid))
    return found


def wait_for_any(descriptors: list[int], seconds: float) -> bool:
    """Wait until one of them has something to say: a process has ended, a pipe has bytes or lost its other end."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1000))


def _others() -> Iterator[int]:
    pids = sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return (pid for pid in pids if pid != os.getpid())


def _has_open(pid: int, file: tuple[int, int]) -> bool:
    with suppress(OSError):  # it ended, or is another user's
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                status = descriptor.stat()
                if (status.st_dev, status.st_ino) == file:
                    return True
    return False
