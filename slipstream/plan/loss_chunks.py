"""How many blocks the loss computes at once: the trainer takes what the plan counts, because both ask here."""

from functools import cache

ROW_TILE = 128
"""Rows of the head's product that a GPU computes together: a chunk of one row more takes as long as one of 128 more."""

_LARGEST_LOGITS = 2 << 30
_LOGITS_SHARE = 64
_BYTES_PER_LOGIT = 4
"""Cross-entropy alone: logits and their gradient, bfloat16 both; what the softmax needs besides is never written."""
_BYTES_PER_LOGIT_WITH_TARGET = 24
"""Two distributions, their logarithms, the gradient, an objective's intermediates. Compiled, where most of them are
never written: assumed, and careful."""

_CPU_LOGITS = 64 << 20
_CPU_BYTES_PER_LOGIT = 8
"""Float32, not compiled: a logit and its gradient. What is there by objective is `cpu_memory`'s to count; these two
decide the order in which a run sums, and stay."""
_CPU_BYTES_PER_LOGIT_WITH_TARGET = 48


def default_rows_on_cpu(vocab_size: int, *, with_target: bool) -> int:
    """Rows of logits that may exist at once where the recipe does not say: 64 MiB of them."""
    return _CPU_LOGITS // ((_CPU_BYTES_PER_LOGIT_WITH_TARGET if with_target else _CPU_BYTES_PER_LOGIT) * vocab_size)


def default_rows(device_bytes: int, vocab_size: int, *, with_target: bool) -> int:
    """Rows of logits that may exist at once where the recipe does not say: a 64th of the device, 2 GiB at most.

    Args:
        device_bytes: all of the device's memory, not what is free, so that a resumed run sums in the same order.
        vocab_size: width of a row.
        with_target: whether the objective compares with the target's distribution.
    """
    per_logit = _BYTES_PER_LOGIT_WITH_TARGET if with_target else _BYTES_PER_LOGIT
    return min(_LARGEST_LOGITS, device_bytes // _LOGITS_SHARE) // (per_logit * vocab_size)


@cache
def fullest_length(blocks: int, most: int, slots: int) -> int:
    """Blocks of every chunk, at most `most`: the length that fills the tiles best, the longest of several as good.

    The last chunk may overlap its neighbour, and a tile is computed whole: what counts is all rows so computed.

    Args:
        blocks: of a pack.
        most: at least 1.
        slots: rows of a block.
    """

    def rows_computed(length: int) -> int:
        return -(-blocks // length) * (-(-length * slots // ROW_TILE) * ROW_TILE)

    return min(range(min(most, blocks), 0, -1), key=rows_computed)
