"""Declared pack lengths: a compiled graph has one shape, so a pack is as long as a bucket or is padded up to the next.

Padding belongs to no document, is never supervised, and no block sees it: it costs time and changes nothing.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.nn import functional

from drafter_trainer.block_mask import TILE

_PADDING = {"document_ids": -1}


def declared_lengths(lengths: Iterable[int]) -> tuple[int, ...]:
    """Ascending, each once; every one a positive multiple of an attention tile's edge."""
    ascending = tuple(sorted(set(lengths)))
    assert ascending, "no pack length is declared"
    assert all(length > 0 and length % TILE == 0 for length in ascending), ascending
    return ascending


def bucket_of(length: int, lengths: tuple[int, ...]) -> int | None:
    """The shortest declared length that holds a pack of `length` tokens; None where none does."""
    return next((bucket for bucket in lengths if length <= bucket), None)


def padded_to(tensors: Mapping[str, Tensor], length: int) -> Mapping[str, Tensor]:
    """A pack's tensors [T, ...] → [length, ...], padding at the end; the same tensors where T is `length`."""
    return {name: _padded(tensor, length, _PADDING.get(name, 0)) for name, tensor in tensors.items()}


def _padded(tensor: Tensor, length: int, value: int) -> Tensor:
    missing = length - tensor.shape[0]
    if missing == 0:
        return tensor
    # From the last dimension backwards: (0, 0) for each but the first.
    return functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing), value=value)
