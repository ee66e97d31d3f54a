"""The Triton kernels of `fused_loss`: what a row's softmax is, then its gradient; each reads the logits once.

A program works on one row, in blocks of columns. In a first pass maximum and sum are carried along (online softmax,
arXiv 1805.02867): the sum so far is scaled when a larger maximum comes.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096
_WARPS = 8
STATISTICS = 5
"""Of a row: the drafter's maximum, the sum of all columns but the label's, of all, the target's maximum, its sum."""
# What a kernel reads beside its arguments must be a constant of Triton's.
_STATISTICS = tl.constexpr(STATISTICS)


class Rows(NamedTuple):
    """`logits`, `target` [R, V]: contiguous, of one floating dtype; target None where cross-entropy is all. `labels`:
    int64 [R], in [0, V). `statistics`: float32 [R, STATISTICS]."""

    logits: Tensor
    target: Tensor | None
    labels: Tensor
    statistics: Tensor


def row_statistics(rows: Rows, guesses: Tensor) -> None:
    """Fill `rows.statistics`, and `guesses` int32 [R] with the first most likely column of every row."""
    count, columns = rows.logits.shape
    _row_statistics[(count,)](
        rows.logits,
        rows.logits if rows.target is None else rows.target,
        rows.labels,
        rows.statistics,
        guesses,
        columns,
        has_target=rows.target is not None,
        block=_block(columns),
        num_warps=_WARPS,
    )


def weigh_rows(rows: Rows, weights: Tensor, divergences: Tensor, shares: tuple[float, float]) -> None:
    """Put the gradient by the logits in their place, and KL(p‖q) of every row into `divergences` float32 [R].

    `weights`: float32 [R]. `shares`: of cross-entropy and of KL in the cost.
    """
    count, columns = rows.logits.shape
    _weigh_rows[(count,)](
        rows.logits,
        rows.logits if rows.target is None else rows.target,
        rows.labels,
        rows.statistics,
        weights,
        divergences,
        *shares,
        columns,
        has_target=rows.target is not None,
        block=_block(columns),
        num_warps=_WARPS,
    )


def _block(columns: int) -> int:
    return min(_COLUMNS, triton.next_power_of_2(columns))


@triton.jit
def _row_statistics(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel takes no structures
    logits, target, labels, statistics, guesses, columns, has_target: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row).to(tl.int32)
    top = -float("inf")
    others = 0.0
    guess = columns
    target_top = -float("inf")
    target_sum = 0.0
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        inside = column < columns
        z = tl.load(logits + row * columns + column, mask=inside, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(z, axis=0))
        candidate = tl.min(tl.where(z == new_top, column, columns), axis=0)
        guess = tl.where(new_top > top, candidate, guess)
        # Without the label: where its probability is nearly 1, what the others have would be lost in the difference.
        shifted = tl.where(column == label, 0.0, tl.exp(z - new_top))
        others = others * tl.exp(top - new_top) + tl.sum(shifted, axis=0)
        top = new_top
        if has_target:
            y = tl.load(target + row * columns + column, mask=inside, other=-float("inf")).to(tl.float32)
            new_target_top = tl.maximum(target_top, tl.max(y, axis=0))
            scale = tl.exp(target_top - new_target_top)
            target_sum = target_sum * scale + tl.sum(tl.exp(y - new_target_top), axis=0)
            target_top = new_target_top
    own = tl.exp(tl.load(logits + row * columns + label).to(tl.float32) - top)
    place = statistics + row * _STATISTICS
    tl.store(place, top)
    tl.store(place + 1, others)
    tl.store(place + 2, others + own)
    tl.store(place + 3, target_top)
    tl.store(place + 4, target_sum)
    tl.store(guesses + row, guess)


@triton.jit
def _weigh_rows(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel takes no structures
    logits,
    target,
    labels,
    statistics,
    weights,
    divergences,
    of_label,
    of_target,
    columns,
    has_target: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row).to(tl.int32)
    weight = tl.load(weights + row)
    place = statistics + row * _STATISTICS
    top, others, total = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    target_top, target_sum = tl.load(place + 3), tl.load(place + 4)
    log_total, log_target_sum = tl.log(total), tl.log(target_sum)
    share, target_share = 1.0 / total, 1.0 / target_sum
    by_label = -others * share
    divergence = 0.0
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        inside = column < columns
        at = row * columns + column
        z = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32) - top
        q = tl.exp(z) * share
        by_logit = of_label * tl.where(column == label, by_label, q)
        if has_target:
            y = tl.load(target + at, mask=inside, other=-float("inf")).to(tl.float32) - target_top
            p = tl.exp(y) * target_share
            by_logit += of_target * (q - p)
            gap = (y - log_target_sum) - (z - log_total)
            divergence += tl.sum(tl.where(inside, p * gap, 0.0), axis=0)
        tl.store(logits + at, (weight * by_logit).to(logits.dtype.element_ty), mask=inside)
    tl.store(divergences + row, divergence)
