"""⑭ From a finished step to its record: the numbers, the pace, the line a person sees."""

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from drafter_trainer.acceptance import AcceptanceMetrics
from drafter_trainer.metrics import StepRecord
from drafter_trainer.progress import Pace
from drafter_trainer.step import StepNumbers


class Waits(NamedTuple):
    """Seconds, since the process began, in which no step could be started: for packs, and for checkpoints."""

    packs: float
    checkpoints: float


class StepReporter:
    """Builds the records of a process, one step after the other."""

    def __init__(
        self, *, total_steps: int, tokens_per_step: int, block_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pace = Pace(total_steps)
        self._tokens_per_step = tokens_per_step
        self._block_size = block_size
        self._clock = clock
        self._ended = clock()
        self._waited = Waits(0.0, 0.0)

    def begin(self) -> None:
        """The loop starts now: what came before belongs to no step."""
        self._ended = self._clock()

    def record(
        self,
        step: int,
        sequence_numbers: tuple[int, ...],
        numbers: StepNumbers | None,
        *,
        learning_rate: float,
        waits: Waits,
        incarnation: int,
    ) -> StepRecord:
        """The record of the step that has just ended.

        Args:
            step: zero-based.
            sequence_numbers: its packs.
            numbers: None when all its packs are quarantined and nothing was trained.
            learning_rate: that was used.
            waits: up to its end.
            incarnation: under which the step was committed.
        """
        now = self._clock()
        seconds, self._ended = now - self._ended, now
        before, self._waited = self._waited, waits
        acceptance = numbers.acceptance if numbers else self._nothing()
        return StepRecord(
            step=step,
            loss=_finite(acceptance.loss),
            loss_hex=acceptance.loss.hex(),
            applied=numbers is not None and numbers.applied,
            slot_accuracy=acceptance.slot_accuracy,
            mean_matched_prefix=acceptance.mean_matched_prefix,
            mean_matched_prefix_with_bonus=acceptance.mean_matched_prefix + 1.0,
            tokens=(step + 1) * self._tokens_per_step,
            learning_rate=learning_rate,
            gradient_norm=_finite(numbers.gradient_norm) if numbers else None,
            seconds=seconds,
            data_wait_seconds=waits.packs - before.packs,
            checkpoint_wait_seconds=waits.checkpoints - before.checkpoints,
            tokens_per_second=self._tokens_per_step / max(seconds, 1e-9),
            eta_seconds=self._pace.eta_seconds(step, seconds),
            incarnation=incarnation,
            sequence_numbers=sequence_numbers,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )

    def _nothing(self) -> AcceptanceMetrics:
        return AcceptanceMetrics(
            loss=math.nan, weight=0.0, blocks=0, mean_matched_prefix=0.0, slot_accuracy=(0.0,) * (self._block_size - 1)
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
