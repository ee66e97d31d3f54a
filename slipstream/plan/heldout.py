"""What measuring held-out acceptance costs a run: the packs of the answers, and forwards without a backward.

The trainer reads the packs once, keeps them in host memory, and matches the drafter at every token of every answer: as
many tokens in a forward as a training pack has anchors. Which packs the target server makes is not known here; they are
filled as it fills one window.
"""

import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.heldout_rows import read_rows
from slipstream.plan.sizes import RunSizes
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec

_BYTES_TO_DEVICE = 6e9
"""A second, from memory that is not page-locked: assumed."""


@dataclass(frozen=True)
class HeldoutAnswers:
    """The rows of a file: (tokens, tokens behind which a block may start) of each."""

    rows: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        """Of all rows, prompts included."""
        return sum(tokens for tokens, _ in self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest row: no pack may be shorter."""
        return max(tokens for tokens, _ in self.rows)

    def packs(self, pack_tokens: int) -> int:
        """That hold them."""
        return sum(1 for _ in _packed(self.rows, pack_tokens))


@dataclass(frozen=True)
class HeldoutCost:
    """Of a run that is measured."""

    answers: int
    tokens: int
    packs: int
    host_bytes: int
    """Of all packs, for the whole run; so much comes over the wire, once."""
    forwards: int
    """Of one measurement."""
    seconds: float
    """Of one measurement."""
    measurements: int | None
    """In the run; None where its length is not known."""

    @property
    def total_seconds(self) -> float | None:
        """In the run."""
        return None if self.measurements is None else self.measurements * self.seconds


def read_answers(spec: RunSpec) -> HeldoutAnswers | None:
    """What `eval.heldout` holds; None where the recipe names none, or the file is not to be had here: it may be on
    another machine, or its trainer's user may read it.

    Raises:
        SlipstreamError: DATA_INVALID or TARGET_FINGERPRINT_MISMATCH, a run would refuse the file, whatever its target.
    """
    path = None if spec.eval.heldout is None else Path(spec.eval.heldout)
    if path is None or not _is_readable(path):
        return None
    found, fingerprints = read_rows(path, spec.data.pack_tokens)
    if len(fingerprints) > 1:
        raise SlipstreamError(
            f"eval.heldout: the answers in {path} are of {len(fingerprints)} targets.",
            reason=Reason.TARGET_FINGERPRINT_MISMATCH,
            remedy="Delete it and make it anew with `slipstream data regenerate RECIPE --heldout`.",
        )
    # A block starts behind every token of an answer but its last.
    return HeldoutAnswers(tuple((len(row.token_ids), row.num_drafted) for row in found.rows))


def _is_readable(path: Path) -> bool:
    try:
        return path.is_file() and os.access(path, os.R_OK)
    except OSError:  # a directory that is not ours to look into, or no name of a file
        return False


def heldout_cost(
    spec: RunSpec, sizes: RunSizes, answers: HeldoutAnswers, *, forward_seconds: float, total_steps: int | None
) -> HeldoutCost:
    """Predict.

    Args:
        spec: of the run.
        sizes: of the run.
        answers: in its file.
        forward_seconds: of one pack with all its anchors, without a backward.
        total_steps: of the run, where that is known.
    """
    packs = list(_packed(answers.rows, sizes.pack_tokens))
    host_bytes = len(packs) * sizes.measured_pack_bytes
    forwards = sum(-(-positions // sizes.anchors_per_pack) for positions in packs)
    every = spec.eval.every_steps or spec.checkpoint.every_steps
    return HeldoutCost(
        answers=len(answers.rows),
        tokens=answers.tokens,
        packs=len(packs),
        host_bytes=host_bytes,
        forwards=forwards,
        seconds=forwards * forward_seconds + host_bytes / _BYTES_TO_DEVICE,
        # The end is always measured.
        measurements=None if total_steps is None else -(-total_steps // every),
    )


def _packed(rows: Iterable[tuple[int, int]], pack_tokens: int) -> Iterator[int]:
    """Positions in each pack: the longest row first, each into the fullest pack that holds it."""
    positions: list[int] = []
    rooms: list[tuple[int, int]] = []  # (room left, pack), sorted
    for tokens, starts in sorted(rows, reverse=True):
        at = bisect_left(rooms, (tokens, -1))
        room, pack = rooms.pop(at) if at < len(rooms) else (pack_tokens, len(positions))
        if pack == len(positions):
            positions.append(0)
        positions[pack] += starts
        insort(rooms, (room - tokens, pack))
    yield from positions
