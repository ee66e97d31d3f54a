"""Where a loop's time goes: seconds by phase, said once at its end."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.telemetry.logs import log_event


class PhaseTimes:
    """Seconds by phase and the number of packs they were spent on. One thread writes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.packs = 0

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

    def count(self) -> None:
        """One more pack has gone through all phases."""
        self.packs += 1

    def milliseconds(self) -> dict[str, float]:
        """Per pack and phase; empty before the first pack."""
        return (
            {phase: round(1e3 * spent / self.packs, 2) for phase, spent in self.seconds.items()} if self.packs else {}
        )

    def log(self, logger: logging.Logger, event: str) -> None:
        """One line, if there was a pack."""
        if self.packs:
            spent = {f"{phase}_ms": value for phase, value in self.milliseconds().items()}
            log_event(logger, "info", event, packs=self.packs, **spent)
