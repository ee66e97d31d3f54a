"""Exports of checkpoints that lie on this machine: `drafter-trainer export` in a process of its own, one after another.

The list is kept in memory: after a restart the directories say what was exported.
"""

import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from slipstream.child_processes import end_process
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event

_log = logging.getLogger(__name__)

_KEPT_LINES = 40
_KEPT_EXPORTS = 200


@dataclass(frozen=True)
class ExportRequest:
    """What is to be exported."""

    run: str
    step: int
    checkpoint: Path
    format: str
    flags: tuple[str, ...]
    """More for `drafter-trainer export`."""


@dataclass(frozen=True)
class Export:
    """One export and how far it is."""

    id: int
    request: ExportRequest
    output: Path
    requested_at: float
    state: str = "QUEUED"
    """QUEUED, RUNNING, SUCCEEDED, FAILED."""
    ended_at: float | None = None
    lines: tuple[str, ...] = field(default=())
    """The last that the process wrote."""


class Exporter:
    """Runs exports, in the order in which they were asked for."""

    def __init__(self, root: Path | None, clock: Callable[[], float]) -> None:
        """`root`: every export gets a directory in it; None: none can be made."""
        self._root, self._clock = root, clock
        self._exports: dict[int, Export] = {}
        self._lock = threading.Lock()
        self._waiting: queue.Queue[int | None] = queue.Queue()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="exporter", daemon=True)

    def start(self) -> None:
        """Begin to work on what is asked for."""
        self._thread.start()

    def stop(self) -> None:
        """End the export that runs, and the thread; idempotent."""
        with self._lock:
            self._stopping = True
            process = self._process
        self._waiting.put(None)
        if process is not None:
            end_process(process)
        if self._thread.is_alive():
            self._thread.join()

    def request(self, wanted: ExportRequest) -> Export:
        """Ask for an export; returns at once.

        Raises:
            SlipstreamError: PATH_NOT_ALLOWED, this server makes none; CHECKPOINT_INVALID, the checkpoint is not on this
                machine.
        """
        if self._root is None:
            raise SlipstreamError(
                "This server makes no exports: it has no --export-root.",
                reason=Reason.PATH_NOT_ALLOWED,
                remedy="Start control-api with --export-root DIR, or use `slipstream checkpoint export` on the "
                "trainer's machine.",
            )
        if not wanted.checkpoint.is_dir():
            raise SlipstreamError(
                f"The checkpoint lies at {wanted.checkpoint} on the trainer's machine, which this server cannot reach.",
                reason=Reason.CHECKPOINT_INVALID,
                remedy=f"Export it there: slipstream checkpoint export {wanted.checkpoint} --to {wanted.format} "
                "--output DIR.",
            )
        with self._lock:
            number = max(self._exports, default=0) + 1
            output = self._root / f"{wanted.run}-step-{wanted.step}-{wanted.format}"
            export = Export(number, wanted, output, self._clock())
            self._exports[number] = export
            # Never one that waits: it would not be made, and nobody would be told.
            ended = [number for number, one in sorted(self._exports.items()) if one.ended_at is not None]
            for oldest in ended[: max(0, len(self._exports) - _KEPT_EXPORTS)]:
                del self._exports[oldest]
        self._waiting.put(number)
        return export

    def of_run(self, run: str, *, after: int, size: int) -> list[Export]:
        """In the order in which they were asked for."""
        with self._lock:
            found = [one for number, one in self._exports.items() if number > after and one.request.run == run]
        return found[:size]

    def _work(self) -> None:
        while (number := self._waiting.get()) is not None:
            with self._lock:
                export = self._exports.get(number)
            if export is not None and not self._stopping:
                self._run(export)

    def _run(self, export: Export) -> None:
        wanted = export.request
        command = [sys.executable, "-P", "-m", "drafter_trainer", "export", str(wanted.checkpoint)]
        command += ["--to", wanted.format, "--output", str(export.output), *wanted.flags]
        lines: list[str] = []
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except OSError as error:
            self._change(replace(export, state="FAILED", ended_at=self._clock(), lines=(str(error),)))
            return
        with self._lock:
            self._process = process
            is_late = self._stopping
        if is_late:
            process.terminate()
        self._change(replace(export, state="RUNNING"))
        assert process.stdout is not None
        for line in process.stdout:
            lines = [*lines, line.decode(errors="replace").rstrip()][-_KEPT_LINES:]
            self._change(replace(export, state="RUNNING", lines=tuple(lines)))
        status = process.wait()
        with self._lock:
            self._process = None
        state = "SUCCEEDED" if status == 0 else "FAILED"
        self._change(replace(export, state=state, ended_at=self._clock(), lines=tuple(lines)))
        log_event(_log, "info", "export_ended", run=wanted.run, step=wanted.step, format=wanted.format, state=state)

    def _change(self, export: Export) -> None:
        with self._lock:
            if export.id in self._exports:
                self._exports[export.id] = export
