"""What a person sees on stderr while a run trains: how far, how good, how fast, how long yet."""

import sys
import time
from contextlib import suppress
from typing import TextIO

from drafter_trainer.metrics import StepRecord

# The first steps of a process are slower (caches, allocator, prefetch still empty) and would spoil the estimate.
_STEPS_NOT_MEASURED = 10


class Pace:
    """Mean seconds a step of this process takes, its first ten steps left out; from that, the time to the end."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._seen = 0
        self._seconds = 0.0

    def eta_seconds(self, step: int, seconds: float) -> float | None:
        """Count `step` (zero-based, just done in `seconds`) and estimate the rest; None while nothing is measured."""
        self._seen += 1
        measured = self._seen - _STEPS_NOT_MEASURED
        if measured <= 0:
            return None
        self._seconds += seconds
        return self._seconds / measured * (self._total_steps - step - 1)


class Progress:
    """One line, rewritten in place on a terminal; elsewhere a plain line every `log_every` seconds and at the end.

    What cannot be shown is left out, and tried again with a later step: the log lies on a full disk, or whoever read it
    has gone. No run ends for that; what counts is in metrics.jsonl, which does end the run.
    """

    def __init__(self, total_steps: int, *, log_every: float, stream: TextIO = sys.stderr) -> None:
        self._total_steps = total_steps
        self._log_every = log_every
        self._stream = stream
        self._in_place = stream.isatty()
        self._line_is_open = False
        self._last_shown = float("-inf")
        self._tokens = 0.0
        self._wait_seconds = 0.0
        self._seconds = 0.0
        self._heldout: float | None = None

    def show(self, record: StepRecord) -> None:
        """Count the step; print when it is time, or when it is the last one."""
        self._seconds += record.seconds
        self._wait_seconds += record.data_wait_seconds
        self._tokens += record.tokens_per_second * record.seconds
        if record.heldout_accepted_length is not None:
            self._heldout = record.heldout_accepted_length
        now = time.monotonic()
        is_last = record.step + 1 == self._total_steps
        if not is_last and now - self._last_shown < (0.2 if self._in_place else self._log_every):
            return
        line = self._line(record)
        self._write(f"\r\x1b[2K{line}" if self._in_place else f"{line}\n")
        self._line_is_open = self._in_place
        self._last_shown = now
        self._seconds = self._wait_seconds = self._tokens = 0.0

    def end(self) -> None:
        """Leave the line that is rewritten, so that the next message starts on its own."""
        if self._line_is_open:
            self._write("\n")
            self._line_is_open = False

    def _write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)
            self._stream.flush()

    def _line(self, record: StepRecord) -> str:
        done = record.step + 1
        loss = "not finite" if record.loss is None else f"{record.loss:.4f}"
        seconds = max(self._seconds, 1e-9)
        heldout = "" if self._heldout is None else f"held-out accepted length {self._heldout:.3f}  "
        return (
            f"step {done}/{self._total_steps} ({done / self._total_steps:.0%})  loss {loss}  "
            f"accepted length {record.mean_matched_prefix_with_bonus:.2f}  {heldout}"
            f"{self._tokens / seconds:,.0f} tok/s  data wait {self._wait_seconds / seconds:.0%}  "
            f"ETA {_duration(record.eta_seconds)}"
        )


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "…"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
