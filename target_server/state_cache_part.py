"""④ A part of a pack: where some documents' states lie in the slot already, only the others are computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from target_server.packing import Pack

Rows = Sequence[tuple[slice, slice]]
"""Of each document: its rows among those computed, and its rows in the pack."""


@dataclass(frozen=True)
class PackPart:
    """What the target is run over."""

    token_ids: npt.NDArray[np.int32]
    """[T'], T' the tokens of the documents; the whole pack: [T] with its padding."""
    document_lengths: tuple[int, ...]
    rows: Rows | None
    """None: the whole pack."""


def part_of(pack: Pack, documents: Sequence[int] | None) -> PackPart:
    """The part with these documents (indices in the pack, ascending, at least one); None: the whole pack."""
    if documents is None:
        return PackPart(pack.token_ids, pack.document_lengths, None)
    spans = _spans(pack.document_lengths)
    there = [spans[document] for document in documents]
    lengths = tuple(pack.document_lengths[document] for document in documents)
    tokens = np.concatenate([pack.token_ids[span] for span in there])
    return PackPart(tokens, lengths, tuple(zip(_spans(lengths), there, strict=True)))


def _spans(lengths: Sequence[int]) -> list[slice]:
    """The rows of documents that lie behind each other."""
    return [slice(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
