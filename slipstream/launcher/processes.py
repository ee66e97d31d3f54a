"""One process of a stack: started or found alive, watched, started again when it dies, given up when it keeps dying."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slipstream.launcher.home import ProcessState, ProcessStatus, is_held, try_lock
from slipstream.launcher.liveness import MARK, Handle, holders, open_handles
from slipstream.launcher.programs import Program

_TAIL_LINES = 8
_REFUSALS = (2, 3)
"""Exit statuses for a wrong setting, path or model: starting again mends none."""


@dataclass(frozen=True)
class RestartPolicy:
    """When a process that died is started again."""

    first_delay: float = 0.5
    most_delay: float = 15.0
    limit: int = 5
    """Deaths in a row after which it is given up."""
    healthy_seconds: float = 30.0
    """Having been ready for so long ends a row of deaths."""

    def delay(self, deaths: int) -> float | None:
        """Seconds to wait after so many deaths in a row; None: give it up."""
        if deaths > self.limit:
            return None
        return min(self.first_delay * 2.0 ** (deaths - 1), self.most_delay)


class SupervisedProcess:
    """One process of a stack. Not for several threads.

    `step` is called again and again: it notices the end of the process and starts it when it is time.
    """

    def __init__(
        self,
        program: Program,
        policy: RestartPolicy,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is started yet.

        Args:
            program: what to run.
            policy: when to start it again.
            say: takes a sentence about what happened.
            clock: seconds, of the restarts.
        """
        self.program = program
        self.state: ProcessState = "WAITING"
        self.restarts = 0
        self.problem = ""
        self.since = time.time()
        """When it was started, or found, in seconds since the epoch."""
        self._policy = policy
        self._say = say
        self._clock = clock
        self._handle: Handle | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._deaths = 0
        self._was_started = False
        self._ready_at: float | None = None
        self._start_at = clock()
        self._kill_at = 0.0

    @property
    def name(self) -> str:
        """Of the process."""
        return self.program.name

    @property
    def is_alive(self) -> bool:
        """Whether it has been started and its end has not been noticed."""
        return self._handle is not None

    @property
    def descriptor(self) -> int | None:
        """Readable once the process has ended; None while there is none."""
        return self._handle.descriptor if self._handle else None

    @property
    def wakes_at(self) -> float | None:
        """When `step` has something to do although nothing happened, by `clock`."""
        return self._start_at if self.state == "WAITING" else None

    @property
    def status(self) -> ProcessStatus:
        """For supervisor.json."""
        return ProcessStatus(
            name=self.name,
            pid=self._handle.pid if self._handle else None,
            state=self.state,
            restarts=self.restarts,
            problem=self.problem,
            log=str(self.program.log),
        )

    def adopt(self) -> bool:
        """Take over the process if it is alive and was started as this program would be; else False."""
        if not is_held(self.program.lock) or _recorded(self.program) != self.program.fingerprint:
            return False
        handles = open_handles(holders(self.program.lock))
        for stranger in handles[1:]:
            stranger.close()
        if not handles:
            return False
        self._handle = handles[0]
        self.state, self.since, self._was_started = "STARTING", time.time(), True
        self._say(f"{self.name}: still alive (process {self._handle.pid}), goes on")
        return True

    def step(self) -> None:
        """Notice its end; start it when it is time."""
        if self.state == "STOPPING":
            if not self.ended(0.0) and self._clock() >= self._kill_at:
                self._say(f"{self.name}: killed, it did not end in time")
                self.signal(signal.SIGKILL)
            return
        if self._handle is not None and self._handle.has_ended():
            self._bury()
        if self.state == "WAITING" and self._clock() >= self._start_at:
            self._start()

    def note_ready(self) -> None:
        """It does its work."""
        if self.state == "STARTING":
            self.state, self.problem = "READY", ""
            self._ready_at = self._clock()

    def note_unready(self, problem: str) -> None:
        """It does not do its work yet, and says why."""
        self.problem = problem

    def try_again(self) -> None:
        """Start what was given up."""
        if self.state == "GAVE_UP":
            self._deaths, self._start_at, self.state = 0, self._clock(), "WAITING"

    def retire(self, grace_seconds: float) -> None:
        """Ask it to end, for good; `step` kills it when it takes longer than that."""
        if self.state != "STOPPING":
            self._say(f"{self.name}: no longer wanted, stops")
            self.state, self.problem, self._kill_at = "STOPPING", "", self._clock() + grace_seconds
            self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it is alive."""
        if self._handle is not None:
            self._handle.send(number)

    def ended(self, seconds: float) -> bool:
        """Wait for its end for so long; True once it is gone. Nothing is started again by this."""
        if self._handle is not None and self._handle.has_ended(seconds):
            self._reap()
        return self._handle is None

    def _start(self) -> None:
        program = self.program
        lock = try_lock(program.lock)
        if lock is None:
            self._died("another process of this home holds its lock", None)
            return
        try:
            with lock, program.log.open("ab") as log:
                lock.truncate(0)
                lock.write(program.fingerprint.encode())
                lock.flush()
                self._child = self._spawn(lock, log)
        except OSError as error:  # a full disk, no more processes: it may pass
            self._died(f"cannot be started: {error}", None)
            return
        self._handle = Handle(self._child.pid)
        self.state, self.since, self.problem = "STARTING", time.time(), "starts"
        if self._was_started:
            self.restarts += 1
        self._was_started = True

    def _spawn(self, lock: IO[bytes], log: IO[bytes]) -> subprocess.Popen[bytes]:
        program = self.program
        # A session of its own: Ctrl-C in the terminal is the supervisor's to pass on, in order, and a terminal that is
        # closed takes nothing with it.
        return subprocess.Popen(
            program.argv,
            env={**os.environ, **dict(program.environment), MARK: f"{self.name}@{program.directory}"},
            cwd=program.directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(lock.fileno(),),
            start_new_session=True,
        )

    def _bury(self) -> None:
        status = self._reap()
        was_healthy = self._ready_at is not None and self._clock() - self._ready_at >= self._policy.healthy_seconds
        if was_healthy:
            self._deaths = 0
        self._died(_in_words(status), status)

    def _died(self, how: str, status: int | None) -> None:
        self._deaths += 1
        delay = self._policy.delay(self._deaths)
        refused = status in _REFUSALS and self._ready_at is None
        self._ready_at = None
        if delay is None or refused:
            self.state = "GAVE_UP"
            why = "starting it again would not mend that" if refused else f"{self._deaths} times in a row"
            self.problem = f"{how} ({why}); the end of {self.program.log}:\n{log_tail(self.program.log)}"
            self._say(f"{self.name}: given up: {self.problem}")
            return
        self.state, self.problem, self._start_at = "WAITING", how, self._clock() + delay
        self._say(f"{self.name}: {how}; started again in {delay:g} s (log: {self.program.log})")

    def _reap(self) -> int | None:
        """Exit status of what has ended; None for one that was no child of this process."""
        assert self._handle is not None
        self._handle.close()
        self._handle = None
        child, self._child = self._child, None
        return child.wait() if child is not None else None


def log_tail(log: Path) -> str:
    """The last lines of a log, indented."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]) or "  (it is empty)"


def _recorded(program: Program) -> str:
    """As what the process that holds the lock was started."""
    return program.lock.read_text(encoding="utf-8", errors="replace")


def _in_words(status: int | None) -> str:
    if status is None:
        return "has ended"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
