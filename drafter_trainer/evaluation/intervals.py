"""How far a number would move with other prompts of the same kind: bootstrap over prompts (Efron, 1979)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from drafter_trainer.evaluation.compare import PromptCount

RESAMPLES = 2000
COVERAGE = 0.95
SEED = 0

Interval = tuple[float, float]


def intervals(counts: Sequence[PromptCount], plain: Sequence[PromptCount]) -> dict[str, Interval | None]:
    """95 % intervals of a source's numbers; None where fewer than two prompts had a round to measure.

    Prompts are drawn with replacement, and the drafter's and the plain decoding of a prompt are drawn together, so
    that a hard prompt does not widen the interval of their ratio.

    Args:
        counts: by prompt, of the drafter (or of plain decoding itself).
        plain: of the same prompts.

    Returns:
        accepted_length, tokens_per_second, speed_ratio_to_plain.
    """
    names = ("accepted_length", "tokens_per_second", "speed_ratio_to_plain")
    table = np.array(
        [(c.tokens, c.rounds, c.seconds, p.tokens, p.seconds) for c, p in zip(counts, plain, strict=True)], dtype=float
    ).reshape(-1, 5)
    table = table[(table[:, 1] > 0) & (table[:, 2] > 0) & (table[:, 4] > 0)]
    if len(table) < 2:
        return dict.fromkeys(names)
    drawn = np.random.default_rng(SEED).integers(len(table), size=(RESAMPLES, len(table)))
    tokens, rounds, seconds, plain_tokens, plain_seconds = table[drawn].sum(axis=1).T
    values = (tokens / rounds, tokens / seconds, tokens / seconds / (plain_tokens / plain_seconds))
    return {name: _middle(value) for name, value in zip(names, values, strict=True)}


def _middle(values: npt.NDArray[np.float64]) -> Interval:
    outside = (1 - COVERAGE) / 2
    low, high = np.quantile(values, (outside, 1 - outside))
    return float(low), float(high)
