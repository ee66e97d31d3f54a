"""Progress: a bar on a terminal; elsewhere a line every few seconds, also while nothing comes."""

import io
import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from drafter_trainer.evaluation.decoding_progress import BarProgress, LineProgress, decoding_progress
from slipstream.telemetry.logs import configure_logging, log_event


class Heard(logging.Handler):
    """Lines of the log as they come, and the moment when one was heard."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, dict[str, object]]] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        """From any thread."""
        with self._changed:
            self.lines.append((record.getMessage(), vars(record)["slipstream_fields"]))
            self._changed.notify_all()

    def wait(self, event: str, prompts: str | None = None, times: int = 1) -> None:
        """Until such a line was heard so often."""

        def count() -> int:
            return sum(name == event and fields.get("prompts") == prompts for name, fields in self.lines)

        with self._changed:
            assert self._changed.wait_for(lambda: count() >= times, timeout=60), self.lines


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger("drafter_trainer.evaluation.decoding_progress")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel("INFO")
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_a_line_now_and_then_while_the_target_loads_and_a_prompt_takes_long(heard: Heard) -> None:
    def slowly() -> Iterator[str]:
        heard.wait("decoded", "0/2", times=2)
        yield "first"
        heard.wait("decoded", "1/2", times=2)
        yield "second"

    with LineProgress(2, every_seconds=0.01) as progress:
        heard.wait("loading", times=2)
        progress.begin(processes=1)
        assert list(progress.follow(slowly())) == ["first", "second"]
    name, fields = heard.lines[-1]
    assert (name, fields["prompts"], fields["seconds_left"]) == ("decoded", "2/2", 0)
    assert {"seconds", "seconds_left"} <= next(
        fields for _, fields in heard.lines if fields.get("prompts") == "1/2"
    ).keys()


def test_one_line_at_the_end_of_what_is_quick(heard: Heard) -> None:
    with LineProgress(3, every_seconds=3600.0) as progress:
        progress.begin(processes=2)
        assert list(progress.follow("abc")) == ["a", "b", "c"]
    assert [(name, fields["prompts"]) for name, fields in heard.lines] == [("decoding", 3), ("decoded", "3/3")]


def test_what_breaks_off_ends_the_lines(heard: Heard) -> None:
    with pytest.raises(KeyboardInterrupt), LineProgress(3, every_seconds=0.01) as progress:
        heard.wait("loading")
        raise KeyboardInterrupt
    assert not progress._thread.is_alive()


class Terminal(io.StringIO):
    """What a terminal was sent."""

    def isatty(self) -> bool:
        """It is one."""
        return True


@contextmanager
def on_a_terminal() -> Iterator[Terminal]:
    """Forty columns, and the process's log goes there. No fixture: pytest's capture sets stderr anew for a test."""
    root, found = logging.getLogger(), Terminal()
    handlers, level = list(root.handlers), root.level
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        for name, value in (("TERM", "xterm"), ("COLUMNS", "40"), ("LINES", "20")):
            patch.setenv(name, value)
        patch.setattr(sys, "stderr", found)
        configure_logging("trainer")
        try:
            yield found
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
            logging.captureWarnings(False)


def log_stream() -> object:
    """Where the handler writes that `configure_logging` made."""
    (handler,) = (one for one in logging.getLogger().handlers if type(one).__module__ == configure_logging.__module__)
    assert isinstance(handler, logging.StreamHandler)
    return handler.stream


def test_lines_of_the_log_stand_whole_above_the_bar() -> None:
    value = "x" * 100
    with on_a_terminal() as terminal:
        with decoding_progress(2) as progress:
            assert isinstance(progress, BarProgress) and log_stream() is sys.stderr is not terminal
            progress.begin(processes=1)
            following = progress.follow(["first", "second"])
            assert next(following) == "first"
            log_event(logging.getLogger(__name__), "warning", "long", value=value)
            assert list(following) == ["second"]
        assert log_stream() is sys.stderr is terminal
        log_event(logging.getLogger(__name__), "warning", "afterwards")
    shown = terminal.getvalue()
    before, whole, after = shown.partition(f" warning trainer long value={value}\n")
    assert whole, "in one piece, wider than the terminal though it is"
    assert re.search(r"\r\x1b\[2K\d\d:\d\d:\d\d$", before), "it begins where the bar was wiped"
    assert "100%" in after and "100%" not in before, "the bar is drawn anew below"
    assert after.endswith(" warning trainer afterwards\n")


def test_what_breaks_off_gives_the_log_its_stream_back() -> None:
    with on_a_terminal() as terminal:
        with pytest.raises(KeyboardInterrupt), decoding_progress(2):
            assert log_stream() is not terminal
            raise KeyboardInterrupt
        assert log_stream() is sys.stderr is terminal
