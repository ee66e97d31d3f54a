"""③ Documents become an endless-by-epochs sequence of packs of a fixed token budget.

Pack i is a pure function of the documents, the three packing fields and i, on every machine and numpy version:
1. Epoch e draws one stream of 64-bit numbers: the raw output of Philox-4x64 with the 128-bit key
   sha256("slipstream.packing.v1:{seed}:{e}")[:16]. Sorting documents by their numbers gives the epoch's order.
2. The order is cut into windows of `window_documents`. A window is packed by best-fit decreasing: longest document
   first (the earlier one on a tie), into the fullest pack it fits (the older one on a tie), else into a new one.
   The emptiest pack of a window that is not the last is taken apart: its documents join the next window.
3. The window's packs are sorted by the stream's next numbers. Within a pack, documents keep the epoch's order.
Every document appears exactly once per epoch and is never split.
"""

import hashlib
import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from target_server.document_table import DocumentTable

PADDING_TOKEN_ID = 0
_CACHED_PLANS = 2  # around the border of two epochs both are in use


@dataclass(frozen=True)
class Pack:
    """A row of T tokens: documents one after the other, then padding."""

    sequence_number: int
    token_ids: npt.NDArray[np.int32]
    """[T], 0 on padding."""
    loss_mask: npt.NDArray[np.uint8]
    """[T], 1 on supervised tokens."""
    document_ids: npt.NDArray[np.int32]
    """[T], index of the document inside the pack; -1 on padding."""
    position_ids: npt.NDArray[np.int32]
    """[T], from 0 in every document; 0 on padding."""
    document_lengths: tuple[int, ...]
    document_names: tuple[str, ...]
    num_tokens: int
    """Tokens that are not padding."""
    num_supervised: int


@dataclass(frozen=True)
class _EpochPlan:
    """Which documents lie in which pack of one epoch."""

    documents: npt.NDArray[np.uint32]
    """[documents], indices, pack after pack."""
    starts: npt.NDArray[np.int64]
    """[packs + 1], pack i holds documents[starts[i]:starts[i + 1]]."""

    @property
    def num_packs(self) -> int:
        return len(self.starts) - 1


class PackSequence:
    """Packs by sequence number, counted through all epochs. Thread-safe; random access is fine."""

    def __init__(self, documents: DocumentTable, *, pack_tokens: int, seed: int, window_documents: int) -> None:
        """No document may be empty or longer than `pack_tokens`, and there must be at least one."""
        lengths = documents.lengths
        assert 0 < len(lengths) < 2**32 and window_documents > 0
        assert lengths.min() > 0 and lengths.max() <= pack_tokens
        self._documents = documents
        self._lengths = lengths
        self._pack_tokens = pack_tokens
        self._seed = seed
        self._window_documents = window_documents
        self._lock = threading.Lock()
        self._plans: OrderedDict[int, _EpochPlan] = OrderedDict()
        self._first_packs = [0]  # first sequence number of every epoch planned so far, and of the one after

    def pack(self, sequence_number: int) -> Pack:
        """Pack `sequence_number` (from 0). The first access far ahead plans every epoch before it once."""
        assert sequence_number >= 0
        while self._first_packs[-1] <= sequence_number:
            self._count_next_epoch(keep_plan=True)
        with self._lock:
            epoch = int(np.searchsorted(self._first_packs, sequence_number, side="right")) - 1
            plan = self._plan(epoch)
            index = sequence_number - self._first_packs[epoch]
        members = plan.documents[plan.starts[index] : plan.starts[index + 1]]
        return self._assemble(sequence_number, members.tolist())

    def total_packs(self, epochs: int) -> int:
        """Packs of the first `epochs` epochs together; epochs differ by a few, since they are packed anew."""
        while len(self._first_packs) <= epochs:
            self._count_next_epoch(keep_plan=len(self._plans) < _CACHED_PLANS)
        return self._first_packs[epochs]

    def _count_next_epoch(self, *, keep_plan: bool) -> None:
        """Planned without the lock: who counts a hundred epochs must not hold up who needs one pack."""
        with self._lock:
            epoch = len(self._first_packs) - 1
            plan = self._plans.get(epoch)
        if plan is None:
            plan = self._make_plan(epoch)
        with self._lock:
            if len(self._first_packs) - 1 != epoch:  # another thread was faster
                return
            self._first_packs.append(self._first_packs[-1] + plan.num_packs)
            if keep_plan:
                self._keep(epoch, plan)

    def _plan(self, epoch: int) -> _EpochPlan:
        if epoch not in self._plans:
            self._keep(epoch, self._make_plan(epoch))
        self._plans.move_to_end(epoch)
        return self._plans[epoch]

    def _keep(self, epoch: int, plan: _EpochPlan) -> None:
        self._plans[epoch] = plan
        while len(self._plans) > _CACHED_PLANS:
            self._plans.popitem(last=False)

    def _make_plan(self, epoch: int) -> _EpochPlan:
        key = hashlib.sha256(f"slipstream.packing.v1:{self._seed}:{epoch}".encode()).digest()[:16]
        stream = np.random.Philox(key=int.from_bytes(key, "little"))
        # Flat arrays of four bytes a document: a plan for 40 million documents takes 160 MB. Only a window is a list.
        order = np.argsort(stream.random_raw(len(self._lengths)), kind="stable").astype(np.uint32)
        documents = np.empty_like(order)
        counts: list[npt.NDArray[np.int32]] = []
        carried: list[int] = []
        filled = 0
        for begin in range(0, len(order), self._window_documents):
            end = min(begin + self._window_documents, len(order))
            # Ranks in the epoch's order stand for documents, so that ties and pack order need no look-up. A window's
            # positions are in the order of its ranks.
            ranks = np.array([*sorted(carried), *range(begin, end)], dtype=np.int64)
            sizes: list[int] = self._lengths[order[ranks]].tolist()
            window = best_fit_decreasing(range(len(ranks)), sizes, self._pack_tokens)
            carried = []
            if end < len(order) and len(window) > 1:
                carried = ranks[window.pop(_emptiest(window, sizes))].tolist()
            packs = [sorted(window[index]) for index in np.argsort(stream.random_raw(len(window)), kind="stable")]
            members = order[ranks[[position for pack in packs for position in pack]]]
            documents[filled : filled + len(members)] = members
            filled += len(members)
            counts.append(np.array([len(pack) for pack in packs], dtype=np.int32))
        assert filled == len(order)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.concatenate(counts), dtype=np.int64)])
        return _EpochPlan(documents, starts)

    def _assemble(self, sequence_number: int, members: Sequence[int]) -> Pack:
        size = self._pack_tokens
        token_ids = np.full(size, PADDING_TOKEN_ID, dtype=np.int32)
        loss_mask = np.zeros(size, dtype=np.uint8)
        document_ids = np.full(size, -1, dtype=np.int32)
        position_ids = np.zeros(size, dtype=np.int32)
        begin = 0
        for index, member in enumerate(members):
            document = self._documents[member]
            span = slice(begin, begin + len(document.token_ids))
            token_ids[span] = document.token_ids
            loss_mask[span] = document.loss_mask
            document_ids[span] = index
            position_ids[span] = np.arange(len(document.token_ids), dtype=np.int32)
            begin = span.stop
        return Pack(
            sequence_number=sequence_number,
            token_ids=token_ids,
            loss_mask=loss_mask,
            document_ids=document_ids,
            position_ids=position_ids,
            document_lengths=tuple(int(self._lengths[member]) for member in members),
            document_names=tuple(self._documents.ids[member] for member in members),
            num_tokens=begin,
            num_supervised=int(loss_mask.sum()),
        )


def best_fit_decreasing(items: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items (indices into `sizes`) into bins of `capacity`; bins in the order they were opened.

    Largest first (the smaller index on a tie), each into the fullest bin it fits (the older on a tie). O(n log n)
    searches; every size must be at most `capacity`.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), sorted
    for item in sorted(items, key=lambda item: (-sizes[item], item)):
        at = bisect_left(rooms, (sizes[item], -1))
        if at < len(rooms):
            room, target = rooms.pop(at)
        else:
            room, target = capacity, len(bins)
            bins.append([])
        bins[target].append(item)
        insort(rooms, (room - sizes[item], target))
    return bins


def _emptiest(bins: Sequence[Sequence[int]], sizes: Sequence[int]) -> int:
    """Index of the bin with the least in it; the oldest on a tie."""
    return min(range(len(bins)), key=lambda index: sum(sizes[item] for item in bins[index]))
