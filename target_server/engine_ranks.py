"""The processes of one engine: started, heard, ended together. One that dies takes the others with it."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from slipstream.child_processes import visible_gpu
from slipstream.telemetry.logs import log_event
from target_server.engine_line import EngineLine, Message
from target_server.engine_plan import EnginePlan

_LEAVE_SECONDS = 5.0
"""How long a process may take to leave once its line is gone."""
_LAST_LINES = 8
# Somebody's wish, or the system's: nothing that a pack did.
_KILLED = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ending:
    """How an engine ended."""

    words: str
    """Which process, how, and what it said last."""
    crashed: bool
    """By itself; false where it was killed, or left in order."""


class RankProcess:
    """One process of an engine."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it.

        Raises:
            OSError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*command, "--control-fd", str(theirs.fileno())],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.name = name
        self.line = EngineLine(ours)
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        self._pump = threading.Thread(target=self._pass_on, name=f"output of {name}", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def end(self, deadline: float) -> tuple[int, bool]:
        """Its exit status once it has gone, and whether it had to be killed; the line was hung up before."""
        late = False
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            self._process.kill()
            status = self._process.wait()
        self._pump.join(1.0)
        self.line.close()
        return status, late

    def last_words(self) -> str:
        """What it said last, in one line."""
        return " | ".join(self._said) or "nothing"

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip("\n")
                self._said.append(line)
                with suppress(OSError, ValueError, AttributeError):  # nobody reads our stderr, or there is none
                    sys.stderr.write(f"{line}\n")
                    sys.stderr.flush()


class Engine:
    """An engine that runs, or is being loaded."""

    def __init__(self, index: int, plan: EnginePlan) -> None:
        """Start its processes; they wait for `begin`.

        Raises:
            OSError: one cannot be started.
        """
        self.name = f"engine-{index}"
        self.ranks: list[RankProcess] = []
        try:
            for rank, device in enumerate(plan.devices[index]):
                name = self.name if plan.ranks == 1 else f"{self.name}.{rank}"
                threads = () if plan.threads is None else ("--threads", str(plan.threads))
                command = [*plan.program, "--name", name, *threads, *plan.flags]
                self.ranks.append(RankProcess(name, command, _environment(device)))
        except OSError:
            self.end()
            raise
        pids = [rank.pid for rank in self.ranks]
        log_event(_log, "info", "engine_started", engine=self.name, devices=plan.devices[index], pids=pids)

    def begin(self, messages: Sequence[Message]) -> None:
        """Tell every rank what it is for."""
        with suppress(OSError):
            for rank, message in zip(self.ranks, messages, strict=True):
                rank.line.send(message)

    def order(self, message: Message) -> None:
        """Tell every rank the same; one that is gone is noticed by whoever listens."""
        with suppress(OSError):
            for rank in self.ranks:
                rank.line.send(message)

    def hang_up(self) -> None:
        """Every process leaves at once; whoever listens to one hears that it is gone."""
        for rank in self.ranks:
            rank.line.hang_up()

    def end(self) -> Ending:
        """Hang up, and wait until every process has gone: from then on nobody writes into the slots it was given."""
        self.hang_up()
        deadline = time.monotonic() + _LEAVE_SECONDS
        statuses = {rank: rank.end(deadline) for rank in self.ranks}
        own = {rank: status for rank, (status, late) in statuses.items() if status != 0 and not late}
        if not own:
            return Ending("it left", crashed=False)
        # Where one was killed, the others failed for want of it.
        first = next((rank for rank, status in own.items() if status in _KILLED), next(iter(own)))
        status = own[first]
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return Ending(f"{first.name} {how}; it said last: {first.last_words()}", crashed=status not in _KILLED)


def _environment(device: str) -> dict[str, str]:
    """A process sees the one GPU that is meant, as the only one, or none."""
    kind, _, index = device.partition(":")
    return {"CUDA_VISIBLE_DEVICES": visible_gpu(int(index)) if kind == "cuda" else ""}
