"""A place in the stream of a run's metrics and events."""

from dataclasses import dataclass
from typing import Self

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


@dataclass(frozen=True)
class Cursor:
    """The newest event and the newest metric that a client has. Its text is the `id` of every message."""

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
        parts = text.split("-")
        if len(parts) != 2 or not all(one.isascii() and one.isdecimal() and len(one) < 16 for one in parts):
            raise SlipstreamError(
                f"The cursor {text[:80]!r} is none of ours.",
                reason=Reason.REQUEST_INVALID,
                remedy="Give the id of the last message, the run's event_cursor, or nothing.",
            )
        return cls(int(parts[0]), int(parts[1]))

    def __str__(self) -> str:
        return f"{self.event}-{self.metric}"
