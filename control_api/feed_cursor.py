"""Places in the streams of a run. The text of one is the `id` of every message."""

from dataclasses import dataclass
from typing import Self

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


@dataclass(frozen=True)
class Cursor:
    """The newest event and the newest metric that a client has."""

    event: int = 0
    metric: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote; nothing means the beginning.

        Raises:
            SlipstreamError: REQUEST_INVALID.
        """
        if not text:
            return cls()
        event, metric = _numbers(text, 2, "the run's event_cursor")
        return cls(event, metric)

    def __str__(self) -> str:
        return f"{self.event}-{self.metric}"


def parse_line(text: str) -> int:
    """The id of the newest line of the log that a client has.

    Raises:
        SlipstreamError: REQUEST_INVALID.
    """
    (line,) = _numbers(text, 1, "the id of a line")
    return line


def _numbers(text: str, count: int, example: str) -> list[int]:
    parts = text.split("-")
    if len(parts) != count or not all(one.isascii() and one.isdecimal() and len(one) < 16 for one in parts):
        raise SlipstreamError(
            f"The cursor {text[:80]!r} is none of ours.",
            reason=Reason.REQUEST_INVALID,
            remedy=f"Give the id of the last message, {example}, or nothing.",
        )
    return [int(one) for one in parts]
