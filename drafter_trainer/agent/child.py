"""The training process of an agent: started in a session of its own, heard over a line, ended with all it started."""

import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream.disk import write_atomically
from slipstream.telemetry.logs import log_event

LEAVE_SECONDS = 180.0
"""How long a training process may take to save and leave."""

_log = logging.getLogger(__name__)


class Child:
    """A training process that this agent has started."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket, number: int) -> None:
        self._process = process
        self._line = line
        self._line.setblocking(False)
        self._unread = b""
        self.number = number
        """1 for the first process of the assignment, and so on."""
        self.told: dict[str, Any] = {}
        """What it has said over its line, merged; see `AgentLine`."""
        self.has_hung_up = False
        """It says nothing more: it is about to end."""
        self.leave_by: float | None = None
        """Set once it was asked to leave."""
        self.is_late = False
        """It did not leave in time, and was killed."""

    @property
    def pid(self) -> int:
        """Process id, and id of its group."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when there is news, and for ever once it has hung up."""
        return self._line.fileno()

    def hear(self) -> None:
        """Take in what it has said."""
        with suppress(BlockingIOError, ConnectionResetError):
            while not self.has_hung_up:
                part = self._line.recv(2**16)
                self.has_hung_up = not part
                self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            with suppress(ValueError, TypeError):
                self.told |= json.loads(line)

    def poll(self) -> int | None:
        """Exit status (negative: the signal that killed it) once it has ended; what it had started is ended then."""
        # Looked at before it is reaped: until then nobody else can have the number of its group.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            self.hear()
            return None
        _kill_group(self.pid)
        status = self._process.wait()
        self.hear()
        self.close()
        return status

    def ask_to_leave(self, now: float) -> None:
        """SIGTERM: it saves and leaves."""
        self._process.terminate()
        self.leave_by = now + LEAVE_SECONDS

    def close(self) -> None:
        """Hang up: what the process notices when its agent has died."""
        self._line.close()

    def kill(self) -> None:
        """SIGKILL, for it and everything it has started."""
        _kill_group(self.pid)


@dataclass(frozen=True)
class ChildPlan:
    """What a training process is started with."""

    assignment: int
    arguments: Sequence[str]
    """Of `drafter-trainer`."""
    log: Path
    """Takes its output; appended to."""


class ChildSlot:
    """Room for one training process; also knows the one that an agent left behind when it was killed.

    A training process holds a lock in the agent's state directory while it lives, so that an agent which is started
    again sees whether the old one is still there. `child.json` says which one that is.
    """

    def __init__(
        self, state: Path, environment: Mapping[str, str], program: Sequence[str] = ("-m", "drafter_trainer")
    ) -> None:
        """`environment`: what a process sees besides this one's. `program`: arguments of the interpreter."""
        self._lock_path = state / "child.lock"
        self._record_path = state / "child.json"
        self._environment = dict(environment)
        self._program = list(program)
        self._orphan_until: float | None = None

    def is_free(self, now: float) -> bool:
        """Whether no process of an earlier agent is left; one that does not leave in time is killed.

        It has noticed that its agent is gone, and is saving.
        """
        with self._lock_path.open("ab") as lock:
            if _try_lock(lock.fileno()):
                self._orphan_until = None
                return True
        pid = self._record().get("pid")
        if self._orphan_until is None:
            log_event(_log, "info", "waiting_for_orphan", pid=pid)
            self._orphan_until = now + LEAVE_SECONDS
        elif now >= self._orphan_until and isinstance(pid, int):
            log_event(_log, "warning", "orphan_killed", pid=pid)
            _kill_group(pid)
        return False

    def next_number(self, assignment: int) -> int:
        """Of the assignment's next process; agents that were started again count on."""
        record = self._record()
        return int(record["number"]) + 1 if record.get("assignment") == assignment else 1

    def start(self, plan: ChildPlan) -> Child:
        """Start a process; the slot must be free.

        Raises:
            OSError: it cannot be started, or its log cannot be written.
        """
        number = self.next_number(plan.assignment)
        # The process is counted before it is there, and its id is known once it is.
        self._write_record(plan.assignment, number, None)
        append_line(plan.log, f"child {number} of this attempt starts")
        ours, theirs = socket.socketpair()
        try:
            process = self._spawn(plan, theirs.fileno())
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._write_record(plan.assignment, number, process.pid)
        return Child(process, ours, number)

    def _spawn(self, plan: ChildPlan, line: int) -> subprocess.Popen[bytes]:
        with self._lock_path.open("ab") as lock, plan.log.open("ab") as output:
            if not _try_lock(lock.fileno()):
                raise BlockingIOError("the training process of an earlier agent is still there")
            return subprocess.Popen(
                [sys.executable, *self._program, *plan.arguments, "--agent-fd", str(line)],
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A lock is held by whoever has its descriptor: from here on by the process.
                pass_fds=(line, lock.fileno()),
                start_new_session=True,
            )

    def _record(self) -> dict[str, Any]:
        try:
            record = json.loads(self._record_path.read_bytes())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _write_record(self, assignment: int, number: int, pid: int | None) -> None:
        record = {"assignment": assignment, "number": number, "pid": pid}
        write_atomically(self._record_path, json.dumps(record) + "\n")


def append_line(log: Path, text: str) -> None:
    """A line of the agent's in the log of its training processes.

    Raises:
        OSError: it cannot be written.
    """
    with log.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                # A process that was killed has left half a line.
                file.write(b"\n")
        moment = datetime.now(UTC).isoformat(timespec="seconds")
        file.write(f"--- {moment} {text}\n".encode())


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
