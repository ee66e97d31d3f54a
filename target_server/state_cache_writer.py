"""⑤ The thread that writes hidden states to the disk. Who has states to offer copies them out and never waits."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.telemetry.logs import log_event
from slipstream.wire.codec import ByteArray
from target_server.state_cache_store import StateStore

PACKS_WAITING = (2, 16)
"""So many packs' states, at least and at most, are held in memory until they are written; more are not kept."""
WAITING_BYTES = 512 * 2**20
"""Between the two, as many as fit."""
REPORT_SECONDS = 60.0
_CLOSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StateRows:
    """One layer's states of one document of a pack."""

    key: bytes
    document: int
    """Its index in the pack."""
    start: int
    """Where it begins in a slot, in bytes."""
    size: int

    @property
    def span(self) -> slice:
        """Its bytes in a slot."""
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class _Job:
    """States that were copied out: the records lie behind each other in the buffer."""

    buffer: ByteArray
    rows: Sequence[StateRows]


class StateWriter:
    """Writes what it is offered into a store, in a thread of its own. `offer` may come from any thread."""

    def __init__(self, store: StateStore, report: Callable[[], None]) -> None:
        """`report` is called about every minute, and at the end."""
        self.not_kept = 0
        """Packs that were offered while others were still being written."""
        self._store = store
        self._report = report
        self._waiting = 0
        """Packs that are not written yet."""
        self._changed = threading.Condition()
        self._free: list[ByteArray] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        """The disk takes no more, or the end has come."""
        self._thread = threading.Thread(target=self._run, name="state-cache", daemon=True)
        self._thread.start()

    def offer(self, slot: ByteArray, rows: Sequence[StateRows]) -> bool:
        """Copy the rows out of a slot, to be written; False when they will not be."""
        size = sum(row.size for row in rows)
        least, most = PACKS_WAITING
        with self._changed:
            if self._stopped.is_set():
                return False
            if self._waiting >= min(most, max(least, WAITING_BYTES // size)):
                self.not_kept += 1
                return False
            self._waiting += 1
            buffer = self._free.pop() if self._free else np.empty(size, np.uint8)
        if len(buffer) < size:
            buffer = np.empty(size, np.uint8)
        end = 0
        for row in rows:
            buffer[end : end + row.size] = slot[row.span]
            end += row.size
        self._jobs.put(_Job(buffer, rows))
        return True

    def wait_until_written(self, seconds: float) -> bool:
        """Wait until all that was taken so far is in the store, or was given up; False when the time is up."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)

    def close(self) -> None:
        """Write what was taken, for a few seconds at most, and end the thread; idempotent."""
        self.wait_until_written(_CLOSE_SECONDS)
        self._stopped.set()
        self._jobs.put(None)
        self._thread.join(_CLOSE_SECONDS)

    @property
    def is_alive(self) -> bool:
        """Whether it may still use the store: the disk hangs, or `close` was not called."""
        return self._thread.is_alive()

    def _run(self) -> None:
        next_report = time.monotonic() + REPORT_SECONDS
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, next_report - time.monotonic()))
            except queue.Empty:
                self._report()
                next_report = time.monotonic() + REPORT_SECONDS
                continue
            if job is None:
                break
            if not self._stopped.is_set():
                self._write(job)
            with self._changed:
                self._waiting -= 1
                self._free.append(job.buffer)
                self._changed.notify_all()
        self._report()

    def _write(self, job: _Job) -> None:
        end = 0
        try:
            for row in job.rows:
                self._store.put(row.key, job.buffer[end : end + row.size])
                end += row.size
        except OSError as error:
            self._stopped.set()
            log_event(
                _log, "warning", "state_cache_stopped", directory=self._store.directory,
                error=error.strerror or str(error), effect="what lies there is used, nothing is added",
                remedy="free space on its disk, or give a smaller --state-cache-bytes, and start the server again",
            )  # fmt: skip
