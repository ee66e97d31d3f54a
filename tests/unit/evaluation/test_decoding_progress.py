"""Progress where nobody sees a bar: a line every few seconds, also while nothing comes."""

import logging
import threading
from collections.abc import Iterator

import pytest

from drafter_trainer.evaluation.decoding_progress import LineProgress


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
