"""How far an evaluation is, on stderr: a bar on a terminal, elsewhere a line every few seconds, whatever takes long."""

import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from slipstream.telemetry.logs import log_event

_log = logging.getLogger(__name__)

T = TypeVar("T")


class DecodingProgress(ABC):
    """Shows that the target is loaded, then how many of `total` prompts are decoded; a context manager."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __enter__(self) -> Self:
        """Begin to show."""
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Show nothing more."""

    @abstractmethod
    def begin(self, processes: int) -> None:
        """The target is loaded, or so many processes load it: what is decoded from here on has its speed."""

    @abstractmethod
    def show(self) -> None:
        """One more is decoded."""

    def follow(self, decodings: Iterable[T]) -> Generator[T, None, None]:
        """The decodings, counted as they come."""
        for decoding in decodings:
            self.done += 1
            self.show()
            yield decoding


def decoding_progress(total: int) -> DecodingProgress:
    """As it suits stderr."""
    return BarProgress(total) if sys.stderr is not None and sys.stderr.isatty() else LineProgress(total)


class LineProgress(DecodingProgress):
    """A thread writes the lines: decoding says nothing while it computes."""

    def __init__(self, total: int, every_seconds: float = 10.0) -> None:
        super().__init__(total)
        self._entered = self._newest = time.monotonic()
        self._begun: float | None = None
        self._every, self._left = every_seconds, threading.Event()
        self._thread = threading.Thread(target=self._tell, name="decoding-progress", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """End it."""
        self._left.set()
        self._thread.join()

    def begin(self, processes: int) -> None:
        """Say so."""
        self._begun = self._newest = time.monotonic()
        log_event(_log, "info", "decoding", prompts=self.total, processes=processes)

    def show(self) -> None:
        """The last one at once, the others when the thread's time has come."""
        self._newest = time.monotonic()
        if self.done == self.total:
            self._say()

    def _tell(self) -> None:
        while not self._left.wait(self._every):
            if self._begun is None:
                log_event(_log, "info", "loading", seconds=round(time.monotonic() - self._entered))
            elif self.done < self.total:
                self._say()

    def _say(self) -> None:
        assert self._begun is not None
        now, done = time.monotonic(), self.done
        each = (self._newest - self._begun) / done if done else 0.0
        left = {"seconds_left": round(max(0.0, each * (self.total - done) - (now - self._newest)))} if done else {}
        log_event(_log, "info", "decoded", prompts=f"{done}/{self.total}", seconds=round(now - self._begun), **left)


class BarProgress(DecodingProgress):
    """With the elapsed time, which moves also while nothing else does."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        super().__init__(total)
        columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn())
        # Lines above the bar are not broken at the terminal's width: who copies one gets it whole.
        self._bar = Progress(*columns, console=Console(stderr=True, soft_wrap=True))
        self._task = self._bar.add_task("loading", total=total)
        self._stream = sys.stderr
        self._handlers: list[logging.StreamHandler[Any]] = []

    def __enter__(self) -> Self:
        """Lines of the log go above the bar from here on, not through it."""
        self._stream = sys.stderr
        self._bar.start()
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._stream:
                handler.setStream(sys.stderr)
                self._handlers.append(handler)
        return self

    def __exit__(self, *raised: object) -> None:
        """The bar stays as it is."""
        try:
            self._bar.stop()
        finally:
            for handler in self._handlers:
                handler.setStream(self._stream)

    def begin(self, processes: int) -> None:  # noqa: ARG002 - the bar shows prompts
        """The remaining time is estimated from here on."""
        self._bar.reset(self._task, description="decoding prompts")

    def show(self) -> None:
        """Move on."""
        self._bar.advance(self._task)
