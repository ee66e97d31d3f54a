"""The directory of one run: who owns it, and where everything in it lies.

    runs/<name>/{metrics.jsonl, spec.json, memory.json, costs.json, first_drafter.json, owner.json, owner.lock,
                 checkpoints/{step-00000042/…, latest, best}}

An agent adds definition.json, with which it starts the trainer, logs/attempt-0001.log, and run-uid: whose it all is.

`owner.json` names the newest incarnation of the run that has begun here. Every write happens under a file lock that is
only given to that incarnation, so two trainers that claim one run never both write, even while the target is down.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from slipstream import disk
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


class RunDirectory:
    """Paths of a run, and the right to write them."""

    def __init__(self, root: Path) -> None:
        """Make the directory (and its parents) if it is missing.

        Raises:
            SlipstreamError: it cannot be made or written (PATH_NOT_ALLOWED), or the disk is full (DISK_FULL).
        """
        self.root = root
        self.metrics = root / "metrics.jsonl"
        self.checkpoints = root / "checkpoints"
        self._owner = root / "owner.json"
        self._lock = root / "owner.lock"
        with disk_errors_in_words(root):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock.touch()

    @property
    def is_used(self) -> bool:
        """True when a run has left results here."""
        return any(self.checkpoints.glob("step-*")) or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    def require_unused(self) -> None:
        """Refuse a directory that holds results of a run.

        Raises:
            SlipstreamError: SPEC_INVALID, with the ways out.
        """
        if self.is_used:
            raise SlipstreamError(
                f"{self.root} already holds a run, and --resume never asks for a new one.",
                reason=Reason.SPEC_INVALID,
                remedy="Go on with that run (leave out --resume never), give another --run-dir or another name "
                "(--set name=…), or delete the directory.",
            )

    def newest_incarnation(self) -> int:
        """The incarnation in owner.json; 0 when no run has begun here."""
        try:
            return int(json.loads(self._owner.read_text())["incarnation"])
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError) as error:
            raise SlipstreamError(
                f"{self._owner} is damaged: {error}.",
                reason=Reason.CHECKPOINT_INVALID,
                remedy="Make sure that no other trainer of this run is alive, then delete this file and start again.",
            ) from error

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Hold the lock to read checkpoints: a trainer that still owns the run prunes none of them meanwhile."""
        with self._locked():
            yield

    def claim(self, incarnation: int, trainer: str) -> None:
        """Record that `incarnation`, just granted by the target server, owns the directory from now on.

        Raises:
            SlipstreamError: INCARNATION_STALE when a newer (or the same) one has begun here already.
        """
        with self._locked(), disk_errors_in_words(self._owner):
            newest = self.newest_incarnation()
            if newest >= incarnation:
                raise _stale(incarnation, newest, self.root)
            record = {
                "incarnation": incarnation,
                "trainer": trainer,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            disk.write_atomically(self._owner, json.dumps(record, indent=2) + "\n")

    @contextmanager
    def owned(self, incarnation: int) -> Iterator[None]:
        """Hold the lock while `incarnation` writes; a newcomer's claim waits until the block is left.

        Raises:
            SlipstreamError: INCARNATION_STALE when another incarnation owns the directory; nothing may be written.
        """
        with self._locked():
            newest = self.newest_incarnation()
            if newest == 0:
                raise _gone(self._owner)
            if newest != incarnation:
                raise _stale(incarnation, newest, self.root)
            yield

    def write_spec(self, spec_json: str, incarnation: int) -> None:
        """Keep the resolved run definition beside the results, for people; programs read it in the checkpoints."""
        with self.owned(incarnation), disk_errors_in_words(self.root):
            disk.write_atomically(self.root / "spec.json", spec_json + "\n")

    def write_report(self, name: str, report_json: str, incarnation: int) -> None:
        """Keep what was predicted and measured: memory.json, phase by phase; costs.json at the end of a process."""
        with self.owned(incarnation), disk_errors_in_words(self.root):
            disk.write_atomically(self.root / name, report_json + "\n")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self.root.is_dir():
            raise _gone(self.root)
        with disk_errors_in_words(self._lock):
            lock = self._lock.open("w")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def disk_errors_in_words(path: Path) -> AbstractContextManager[None]:
    """Turn what the file system refuses while `path`, of a run, is written into a SlipstreamError.

    Raises:
        SlipstreamError: DISK_FULL, or PATH_NOT_ALLOWED.
    """
    return disk.disk_errors_in_words(
        path,
        flag="--run-dir",
        when_full="Free some space or lower checkpoint.keep, then start the same command again: it goes on from the "
        "last complete checkpoint.",
    )


def _gone(path: Path) -> SlipstreamError:
    return SlipstreamError(
        f"{path} is gone: somebody has removed or emptied the directory of a run that is trained.",
        reason=Reason.CHECKPOINT_INVALID,
        remedy="Nothing was written after that. Put the directory back and start again; without it the run begins "
        "anew.",
    )


def _stale(own: int, newest: int, root: Path) -> SlipstreamError:
    return SlipstreamError(
        f"Another trainer has taken over {root}: it owns incarnation {newest}, this one is incarnation {own}.",
        reason=Reason.INCARNATION_STALE,
        remedy="Nothing was written after that. Let the newer trainer go on, or stop it and start this one again.",
    )
