"""⑭ What every step measured, one JSON object a line in metrics.jsonl.

A resumed run trains the steps after its checkpoint again and writes them again: the last record of a step counts.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafter_trainer.run_directory import disk_errors_in_words


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    step: int
    """Zero-based."""
    loss: float | None
    """Weighted mean over the counted slots of the step; null when it is not finite."""
    loss_hex: str
    """The same float32, exactly (float.hex): equal strings mean bit-equal losses."""
    applied: bool
    """False: loss or gradient was not finite, the weights are unchanged."""
    slot_accuracy: tuple[float, ...]
    """Share of right tokens among the counted ones, slots 1 … B-1."""
    mean_matched_prefix: float
    """Leading right tokens per block, the bonus token that decoding adds not included."""
    mean_matched_prefix_with_bonus: float
    tokens: int
    """Pack slots trained since step 0, padding included."""
    learning_rate: float
    gradient_norm: float | None
    """Global, before clipping; null when it is not finite."""
    seconds: float
    """From the end of the step before to the end of this one."""
    data_wait_seconds: float
    """The part of `seconds` in which no step could be started for want of packs."""
    checkpoint_wait_seconds: float
    """The part of `seconds` that went into a checkpoint: copying the state, after the one before was written."""
    tokens_per_second: float
    eta_seconds: float | None
    """To the end of the run; null while too little has been measured."""
    incarnation: int
    sequence_numbers: tuple[int, ...]
    """The packs of the step."""
    time: str
    """UTC, ISO 8601."""
    heldout_accepted_length: float | None = None
    """Tokens a round, bonus included, that decoding the held-out prompts with the weights after this step would give;
    null where nothing was measured, as the other heldout_ fields."""
    heldout_slot_acceptance: tuple[float, ...] | None = None
    """Share of rounds in which the draft in slot 1 … B-1 is kept, all before it included."""
    heldout_sources: dict[str, dict[str, Any]] | None = None
    """The same by source of the prompts: accepted_length, slot_acceptance, and the answers, rounds, tokens counted."""
    heldout_seconds: float = 0.0
    """The part of `seconds` that measuring took."""


class MetricsFile:
    """Appends records; a line torn by a crash is cut off when the file is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_errors_in_words(path):
            # Unbuffered: nothing is left to be written, and to fail again, when the file is closed.
            self._file = path.open("ab", buffering=0)
            self._file.truncate(_whole_lines(path))

    def append(self, record: StepRecord) -> None:
        """Hand one line to the operating system: it survives the death of this process.

        Raises:
            SlipstreamError: DISK_FULL.
        """
        self.append_fields(asdict(record))

    def append_fields(self, record: Mapping[str, Any]) -> None:
        """The same for a record that was read from the file: what it says of its step from now on."""
        line = memoryview(json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        with disk_errors_in_words(self._path):
            while line:
                line = line[self._file.write(line) :]

    def newest(self) -> dict[str, Any] | None:
        """The record that was written last, by this process or one before; None where the last line is none."""
        lines = self._path.read_bytes().splitlines()
        try:
            record = json.loads(lines[-1]) if lines else None
        except ValueError:
            return None  # a power cut leaves such lines; the agent passes them over, too
        return record if isinstance(record, dict) else None

    def sync(self) -> None:
        """Bring all records to the disk, so that the steps of a checkpoint are there when the checkpoint is.

        Raises:
            SlipstreamError: DISK_FULL.
        """
        with disk_errors_in_words(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


def _whole_lines(path: Path) -> int:
    """Bytes up to and including the last line break."""
    return path.read_bytes().rfind(b"\n") + 1
