"""Logs of every process: one line an event on stderr, `HH:MM:SS level program event key=value…`, or JSON lines."""

import json as json_format
import logging
import sys
import time
from datetime import datetime
from typing import Any

from slipstream.telemetry.crash_report import summarize

_FIELDS = "slipstream_fields"
_RESERVED = frozenset({"time", "level", "program", "event"})
_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:@%+,-[]()#~")
# Libraries that narrate; their warnings are kept.
_CHATTY = ("asyncio", "grpc", "h5py", "httpcore", "httpcore2", "httpx", "httpx2", "torch", "transformers", "urllib3")


def configure_logging(program: str, *, level: str = "info", json: bool = False) -> None:
    """Send the records of this process to stderr; calling it again replaces the earlier setting.

    Tracebacks go to the crash file, whose path the line names. Python's warnings become records too.

    Raises:
        ValueError: `level` is not one of debug, info, warning, error.
    """
    if level not in ("debug", "info", "warning", "error"):
        raise ValueError(f"log level {level!r} is not debug, info, warning or error")
    handler = _StderrHandler()
    handler.setFormatter(_JsonFormatter(program) if json else _LineFormatter(program))
    root = logging.getLogger()
    for previous in [handler for handler in root.handlers if isinstance(handler, _StderrHandler)]:
        root.removeHandler(previous)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    logging.captureWarnings(True)


def log_event(logger: logging.Logger, level: int | str, event: str, **fields: Any) -> None:
    """Log an event with its fields.

    Args:
        logger: the module's logger.
        level: `logging.INFO` or "info".
        event: constant snake_case name of what happened; numbers and names belong into fields.
        fields: shown in the order given; None is shown as `-`.
    """
    assert _RESERVED.isdisjoint(fields), f"fields {sorted(_RESERVED & fields.keys())} are part of every line"
    number = level if isinstance(level, int) else logging.getLevelNamesMapping()[level.upper()]
    logger.log(number, event, extra={_FIELDS: fields})


class _StderrHandler(logging.StreamHandler[Any]):
    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Say in one line that a record was lost, where the standard handler prints a traceback."""
        error = sys.exc_info()[1]
        try:
            sys.stderr.write(f"a log record of {record.name} (line {record.lineno}) was lost: {error!r}\n")
        except (OSError, ValueError):
            # Nobody reads stderr any more; training goes on.
            return


class _EventFormatter(logging.Formatter):
    def __init__(self, program: str) -> None:
        super().__init__()
        self.program = program

    def event_and_fields(self, record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
        """Ours: the event's name and fields. A library's record: `log` with its logger and message."""
        fields: dict[str, Any] | None = getattr(record, _FIELDS, None)
        if fields is None:
            event, fields = "log", {"logger": record.name, "message": record.getMessage()}
        else:
            event, fields = record.getMessage(), dict(fields)
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception"] = summarize(self.program, record.exc_info[1])
        return event, fields


class _LineFormatter(_EventFormatter):
    def format(self, record: logging.LogRecord) -> str:
        event, fields = self.event_and_fields(record)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        words = [clock, record.levelname.lower(), self.program, event]
        return " ".join(words + [f"{key}={_show(value)}" for key, value in fields.items()])


class _JsonFormatter(_EventFormatter):
    def format(self, record: logging.LogRecord) -> str:
        event, fields = self.event_and_fields(record)
        moment = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        line = {"time": moment, "level": record.levelname.lower(), "program": self.program, "event": event}
        return json_format.dumps(line | fields, ensure_ascii=False, default=str)


def _show(value: Any) -> str:
    """A value without blanks or line breaks around it: bare where unambiguous, else a JSON string."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if text and _BARE.issuperset(text) else json_format.dumps(text, ensure_ascii=False)
