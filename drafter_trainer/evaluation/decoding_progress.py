"""How far the decoding of prompts is, on stderr: a bar on a terminal, a line now and then elsewhere."""

import logging
import sys
import time
from collections.abc import Generator, Iterable
from typing import TypeVar

from slipstream.telemetry.logs import log_event

_log = logging.getLogger(__name__)

T = TypeVar("T")


def with_progress(decodings: Iterable[T], total: int) -> Generator[T, None, None]:
    """The decodings, `total` of them, shown as they come."""
    if sys.stderr is not None and sys.stderr.isatty():
        yield from _with_bar(decodings, total)
    else:
        yield from with_lines(decodings, total)


def with_lines(decodings: Iterable[T], total: int, every_seconds: float = 10.0) -> Generator[T, None, None]:
    """The decodings; a line is logged when the last one is this long ago, and at the end."""
    began = logged = time.monotonic()
    for done, decoding in enumerate(decodings, start=1):
        now = time.monotonic()
        if done == total or now >= logged + every_seconds:
            logged = now
            left = (now - began) / done * (total - done)
            log_event(_log, "info", "decoded", prompts=f"{done}/{total}", seconds_left=round(left))
        yield decoding


def _with_bar(decodings: Iterable[T], total: int) -> Generator[T, None, None]:
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:-1], TextColumn("ETA"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield from progress.track(decodings, total=total, description="decoding prompts")
