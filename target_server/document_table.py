"""All documents of a data set in three flat files that are mapped, not read: a million documents cost no memory.

| file | holds, little-endian |
|---|---|
| `tokens.bin` | int32 [tokens], document after document; a supervised token t is written as ~t, which is negative |
| `ids.bin` | UTF-8 ids, one behind the other |
| `documents.bin` | int64 [documents, 4]: end of its tokens, end of its id, hash of the id, file << 40 \\| record |
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from target_server.tokens_and_mask import Document

TOKENS_FILE, IDS_FILE, DOCUMENTS_FILE = "tokens.bin", "ids.bin", "documents.bin"
TOKEN_TYPE, ROW_TYPE = np.dtype("<i4"), np.dtype("<i8")
COLUMNS = 4
TOKENS_END, ID_END, ID_HASH, PLACE = range(COLUMNS)
_RECORD_BITS = 40


@dataclass(frozen=True)
class EncodedDocuments:
    """Documents in the form in which they are stored; ends count from the first of them."""

    tokens: npt.NDArray[np.int32]
    """[tokens], supervised ones inverted."""
    ids: bytes
    rows: npt.NDArray[np.int64]
    """[documents, 4]."""


def encode_documents(documents: Sequence[tuple[Document, int, int]]) -> EncodedDocuments:
    """Documents, each with its id's hash and its place (see `place_of`)."""
    tokens = [
        np.where(document.loss_mask.astype(bool), ~document.token_ids, document.token_ids)
        for document, _, _ in documents
    ]
    names = [document.id.encode() for document, _, _ in documents]
    rows = np.empty((len(documents), COLUMNS), dtype=ROW_TYPE)
    rows[:, TOKENS_END] = np.cumsum([len(each) for each in tokens])
    rows[:, ID_END] = np.cumsum([len(each) for each in names])
    rows[:, ID_HASH] = [identity for _, identity, _ in documents]
    rows[:, PLACE] = [place for _, _, place in documents]
    flat = np.concatenate(tokens) if tokens else np.empty(0, dtype=TOKEN_TYPE)
    return EncodedDocuments(flat.astype(TOKEN_TYPE), b"".join(names), rows)


def place_of(file: int, record: int) -> int:
    """Where a document came from: the number of the file (from 0) and of the record in it."""
    assert record < 1 << _RECORD_BITS
    return file << _RECORD_BITS | record


def split_place(place: int) -> tuple[int, int]:
    """The file and the record of `place_of`."""
    return place >> _RECORD_BITS, place & (1 << _RECORD_BITS) - 1


class DocumentTable:
    """Documents by index. Thread-safe: nothing is ever written."""

    def __init__(self, encoded: EncodedDocuments) -> None:
        """At least one document. What is given may be mapped from files."""
        assert len(encoded.rows) > 0
        self._tokens, self._rows = encoded.tokens, encoded.rows
        self.ids: Sequence[str] = _Ids(encoded.ids, encoded.rows)

    @classmethod
    def open(cls, directory: Path) -> "DocumentTable":
        """Map the files of a directory. Raises OSError, or ValueError for a file that is empty."""
        ids = np.memmap(directory / IDS_FILE, dtype=np.uint8, mode="r")
        return cls(
            EncodedDocuments(
                tokens=np.memmap(directory / TOKENS_FILE, dtype=TOKEN_TYPE, mode="r"),
                ids=memoryview(ids),  # type: ignore[arg-type] # sliced like bytes, and never copied
                rows=np.memmap(directory / DOCUMENTS_FILE, dtype=ROW_TYPE, mode="r").reshape(-1, COLUMNS),
            )
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        begin, end = _span(self._rows, index, TOKENS_END)
        stored = np.asarray(self._tokens[begin:end])
        supervised = stored < 0
        return Document(self.ids[index], np.where(supervised, ~stored, stored), supervised.astype(np.uint8))

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    def place(self, index: int) -> tuple[int, int]:
        """Number of the file (from 0) and of the record that a document came from."""
        return split_place(int(self._rows[index, PLACE]))

    @property
    def id_hashes(self) -> npt.NDArray[np.int64]:
        """`[documents]`."""
        return self._rows[:, ID_HASH]

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """`[documents]`; see `split_place`."""
        return self._rows[:, PLACE]

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self._rows[-1, TOKENS_END])

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """[documents], tokens of each."""
        lengths = np.empty(len(self), dtype=np.int32)
        lengths[0] = self._rows[0, TOKENS_END]
        np.subtract(self._rows[1:, TOKENS_END], self._rows[:-1, TOKENS_END], out=lengths[1:], casting="unsafe")
        return lengths


class _Ids(Sequence[str]):
    """Ids, decoded one at a time."""

    def __init__(self, text: bytes, rows: npt.NDArray[np.int64]) -> None:
        self._text, self._rows = text, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        begin, end = _span(self._rows, index, ID_END)
        return bytes(self._text[begin:end]).decode()


def _span(rows: npt.NDArray[np.int64], index: int, column: int) -> tuple[int, int]:
    return int(rows[index - 1, column]) if index else 0, int(rows[index, column])
