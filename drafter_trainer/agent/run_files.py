"""What a run has left in its directory, as heartbeats say it: metrics, log lines, checkpoints."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drafter_trainer.agent.line_tail import LineTail, last_line
from slipstream.checkpoint_name import MANIFEST

MAX_LINES = 200
"""Of metrics, and of the log, in one heartbeat. All of a heartbeat is less than 1 MiB."""
_METRIC_BYTES = 2**18
_LOG_BYTES = 2**16
_LONGEST_LOG_LINE = 2000
_MAX_CHECKPOINTS = 1000
_LONGEST_PATH = 255
_HELDOUT_BYTES = 2**17
_LONGEST_LENGTH = 1e6
_LARGEST = 2**53 - 1
_DEEPEST = 20
_NO_RECORD = {"step": 0, "incarnation": 0}
# A terminal that shows the line later is not steered by it.
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) != "\t"}


@dataclass(frozen=True)
class Metrics:
    """Lines of metrics.jsonl, parsed."""

    first: int
    records: list[dict[str, Any]]
    reach_end: bool


@dataclass(frozen=True)
class LogLines:
    """Lines of the attempt's log, as text."""

    first: int
    lines: list[str]
    reach_end: bool


class RunFiles:
    """Reads; it writes nothing."""

    def __init__(self, directory: Path, attempt: int) -> None:
        self.directory = directory
        self.log = directory / "logs" / f"attempt-{attempt:04d}.log"
        self._metrics_path = directory / "metrics.jsonl"
        self._metrics = LineTail(self._metrics_path)
        self._log = LineTail(self.log)

    def metrics(self, first: int) -> Metrics:
        """From line `first` on, as many as a heartbeat takes."""
        found = self._metrics.read(first, limit=MAX_LINES, max_bytes=_METRIC_BYTES)
        return Metrics(first, as_records(found.lines), found.reach_end)

    def log_lines(self, first: int) -> LogLines:
        """From line `first` on, as many as a heartbeat takes."""
        found = self._log.read(first, limit=MAX_LINES, max_bytes=_LOG_BYTES)
        return LogLines(first, [printable(line) for line in found.lines], found.reach_end)

    def end_of_metrics(self) -> int:
        """Bytes of complete lines."""
        return last_line(self._metrics_path)[1]

    def steps_trained(self) -> int | None:
        """Counted from step 0 of the run; None before the first."""
        record = _record(last_line(self._metrics_path)[0])
        return record["step"] + 1 if record else None

    def log_tail(self, *, lines: int = 40, longest: int = 500) -> list[str]:
        """The last lines of the log, cut."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - _LOG_BYTES))
                text = file.read()
        except OSError:
            return []
        return [printable(line)[:longest] for line in text.splitlines()[-lines:]]

    def checkpoints(self) -> list[dict[str, Any]]:
        """The complete ones, in the order of their steps; which of them is the best where the run measures."""
        directories = list(self.directory.glob("checkpoints/step-*"))
        found = [one for path in directories if (one := _checkpoint(path, len(directories))) is not None]
        best = _best(self.directory / "checkpoints")
        for one in found:
            one["is_best"] = Path(one["path"]).name == best
        return sorted(found, key=lambda one: int(one["step"]))[-_MAX_CHECKPOINTS:]

    def newest_checkpoint(self) -> tuple[int, int] | None:
        """(incarnation, step) of it."""
        return max(((one["incarnation"], one["step"]) for one in self.checkpoints()), default=None)


def as_records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """One record a line.

    Line numbers must not be missing, so a line that is no record is sent as the record beside it, which the control API
    then has already.
    """
    parsed = [_record(line) for line in lines]
    stand_in: dict[str, Any] = next((one for one in parsed if one is not None), _NO_RECORD)
    records = []
    for one in parsed:
        stand_in = one or stand_in
        records.append(stand_in)
    return records


def printable(line: bytes) -> str:
    """A line of a log as text: what a terminal would show of a line that was written over, cut."""
    text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    return text.translate(_CONTROL_PICTURES)[:_LONGEST_LOG_LINE]


def _record(line: bytes) -> dict[str, Any] | None:
    """A record as the control API takes them; None for anything else."""
    try:
        record = json.loads(line)
        if not isinstance(record, dict) or _depth(record) > _DEEPEST:
            return None
        json.dumps(record, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    identity = (record.get("step"), record.get("incarnation"))
    return record if all(type(one) is int and 0 <= one <= _LARGEST for one in identity) else None


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=-1)


def _checkpoint(directory: Path, siblings: int) -> dict[str, Any] | None:
    """None for one that is not complete, or is removed just now. `siblings`: how many share a heartbeat."""
    try:
        saved_at = (directory / MANIFEST).stat().st_mtime
        state = json.loads((directory / "state.json").read_bytes())
        path = str(directory.absolute())
        return {
            "step": int(state["cursor"]["next_step"]),
            "incarnation": int(state["incarnation"]),
            "path": path if len(path) <= _LONGEST_PATH else directory.name,
            "saved_at": datetime.fromtimestamp(saved_at, UTC).isoformat(),
            "heldout": _heldout(state.get("heldout"), _HELDOUT_BYTES // siblings),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _heldout(measured: Any, most_bytes: int) -> dict[str, Any] | None:
    """What was measured on held-out answers, as the control API takes it; without sources where they are too many."""
    if not isinstance(measured, Mapping) or not _is_length(overall := measured.get("accepted_length")):
        return None
    given = measured.get("by_source")
    sources = {one: length for one, length in given.items() if _is_length(length)} if isinstance(given, dict) else {}
    try:
        size = len(json.dumps(sources, ensure_ascii=False).encode())
    except UnicodeEncodeError:  # half a character in a name
        size = most_bytes + 1
    return {"accepted_length": overall, "by_source": sources if size <= most_bytes else {}}


def _is_length(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LONGEST_LENGTH


def _best(checkpoints: Path) -> str | None:
    """The name of the directory that the link `best` points to."""
    try:
        return (checkpoints / "best").readlink().name
    except OSError:
        return None
