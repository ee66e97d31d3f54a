"""All documents of a data set in two flat arrays: a million documents cost no million objects."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from target_server.tokens_and_mask import Document


class DocumentTable:
    """Documents by index; their arrays are read-only views."""

    def __init__(
        self,
        ids: list[str],
        token_ids: npt.NDArray[np.int32],
        loss_mask: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
    ) -> None:
        """`token_ids`, `loss_mask`: [sum of lengths]; `offsets`: [documents + 1], document i = offsets[i]:[i + 1]."""
        assert len(offsets) == len(ids) + 1 and offsets[-1] == len(token_ids) == len(loss_mask)
        self.ids = ids
        self.token_ids = token_ids
        self.loss_mask = loss_mask
        self.offsets = offsets
        for array in (token_ids, loss_mask, offsets):
            array.flags.writeable = False

    @classmethod
    def of(cls, documents: Iterable[Document]) -> "DocumentTable":
        """Collect documents from a stream; holds their bytes once, plus the slack of a growing buffer."""
        ids, lengths = [], [0]
        tokens, mask = bytearray(), bytearray()
        for document in documents:
            ids.append(document.id)
            lengths.append(len(document.token_ids))
            tokens += np.ascontiguousarray(document.token_ids, dtype=np.int32).data.cast("B")
            mask += np.ascontiguousarray(document.loss_mask, dtype=np.uint8).data
        return cls(
            ids,
            np.frombuffer(tokens, dtype=np.int32),
            np.frombuffer(mask, dtype=np.uint8),
            np.cumsum(lengths, dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self.ids):
            raise IndexError(f"document {index} of {len(self.ids)}")
        span = slice(self.offsets[index], self.offsets[index + 1])
        return Document(self.ids[index], self.token_ids[span], self.loss_mask[span])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[documents], tokens of each."""
        return np.diff(self.offsets)
