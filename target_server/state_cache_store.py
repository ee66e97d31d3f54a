"""⑤ Records by key on a disk, within a budget of bytes: what was used least recently goes first, by whole segments."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.disk import disk_errors_in_words
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from slipstream.wire.codec import ByteArray
from target_server.state_cache_directory import FIXED_BYTES, FLAG, open_directory, segment_numbers
from target_server.state_cache_segment import Place, Segment, disk_bytes

SEGMENTS = 64
"""Of a full cache: so much of it goes at once, and so many files are open, twice."""
MIN_BYTES = 2**20
_STAYS = 0.25
"""A segment that was used while the last bytes were asked for, this share of the budget, is not given up."""
_SYNC_BYTES = 256 * 2**20
"""Written at most without the disk having it: whoever syncs a file on this disk may have to wait for all of it."""

_log = logging.getLogger(__name__)


@dataclass
class StoreNumbers:
    """What happened since the store was opened."""

    bytes_read: int = 0
    bytes_written: int = 0
    evictions: int = 0
    """Segments that were given up."""
    corrupt: int = 0
    """Records that were not what had been written: never served."""
    refused: int = 0
    """Records that were not written, since everything there was in use."""


class StateStore:
    """Records of bytes. One thread calls `put`; any may look up and read."""

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        """Take the directory, and give up what is beyond the budget.

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED when the directory is in use or not a cache of this format, or the
                budget is useless; PATH_NOT_ALLOWED, DISK_FULL.
        """
        if budget_bytes < MIN_BYTES:
            raise too_small(budget_bytes, MIN_BYTES)
        self.directory = directory
        self.budget_bytes = budget_bytes
        self.numbers = StoreNumbers()
        self._segment_bytes = budget_bytes // SEGMENTS
        self._lock = threading.Lock()
        self._index: dict[bytes, Place] = {}
        self._segments: list[Segment] = []
        self._active: Segment | None = None
        self.used_bytes = FIXED_BYTES
        """What the files take on the disk, in whole blocks: never more than the budget."""
        self._clock = 0
        """Bytes that were asked for, found or not."""
        self._unsynced = 0
        self._lock_fd = open_directory(directory)
        try:
            with disk_errors_in_words(directory, flag=FLAG):
                self._load()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Records that can be found."""
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    @contextlib.contextmanager
    def reading(self, sizes: Mapping[bytes, int]) -> Iterator[dict[bytes, Place]]:
        """Where the records lie, of those that are there; inside the block they stay.

        Args:
            sizes: bytes of each record that is asked for, by key.
        """
        with self._lock:
            self._clock += sum(sizes.values())
            found = {key: self._index[key] for key, size in sizes.items() if self._has(key, size)}
            held = {place.segment for place in found.values()}
            for segment in held:
                segment.readers += 1
        try:
            yield found
        finally:
            with self._lock:
                for segment in held:
                    segment.readers -= 1

    def read(self, key: bytes, place: Place, buffer: ByteArray) -> bool:
        """Fill `buffer` with a record, inside of `reading`; False when it is damaged, and then it is forgotten."""
        whole = place.segment.read(place, buffer)
        if whole:
            place.segment.touch(self._clock)
            with self._lock:
                self.numbers.bytes_read += place.size
            return True
        with self._lock:
            self.numbers.corrupt += 1
            if self._index.get(key) is place:
                del self._index[key]
        log_event(
            _log, "warning", "state_cache_corrupt", file=place.segment.path, offset=place.offset, bytes=place.size,
            effect="computed again",
        )  # fmt: skip
        return False

    def put(self, key: bytes, record: ByteArray) -> bool:
        """Write a record (uint8, contiguous); False when it is there already, or there is no room that nobody uses.

        Raises:
            OSError: the disk does not take it; everything before it stays.
        """
        if key in self._index:
            return False
        segment = self._room(len(record))
        if segment is None:
            self.numbers.refused += 1
            return False
        before = segment.disk_bytes()
        place = segment.append(key, record)
        self.used_bytes += segment.disk_bytes() - before
        with self._lock:
            self._index[key] = place
            segment.last_used = self._clock
            self.numbers.bytes_written += place.size
        self._unsynced += place.size
        if self._unsynced >= _SYNC_BYTES:
            os.fdatasync(segment.data_fd)
            self._unsynced = 0
        return True

    def close(self) -> None:
        """Let the directory go; idempotent. Nobody may be in a call."""
        for segment in self._segments:
            segment.close()
        self._segments.clear()
        self._index.clear()
        self._active = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _has(self, key: bytes, size: int) -> bool:
        place = self._index.get(key)
        return place is not None and place.size == size

    def _load(self) -> None:
        for number in segment_numbers(self.directory):
            segment, found = Segment.open(self.directory, number)
            self._segments.append(segment)
            self.used_bytes += segment.disk_bytes()
            self._index.update(found)  # a key that was written twice counts where it was written last
        for segment in [segment for segment in self._segments if not segment.keys]:
            self._evict(segment)
        self._active = self._segments[-1] if self._segments else None
        self._segments.sort(key=lambda segment: segment.modified_ns)
        while self.used_bytes > self.budget_bytes:
            self._evict(self._segments[0])

    def _room(self, size: int) -> Segment | None:
        """A segment that takes a record of `size` bytes within the budget."""
        if FIXED_BYTES + disk_bytes(size, 1) > self.budget_bytes:
            return None
        active = self._active
        if active is not None and active.end and active.end + size > self._segment_bytes:
            active = None
        while self.used_bytes + _growth(active, size) > self.budget_bytes:
            victim = self._victim()
            if victim is None:
                return None
            if victim is active:
                active = None
            self._evict(victim)
            self.numbers.evictions += 1
        if active is None:
            active = Segment.create(self.directory, self._next_number())
            self._segments.append(active)
        self._active = active
        return active

    def _victim(self) -> Segment | None:
        """The segment that was used least recently and may go. It cannot be found any more from here on."""
        with self._lock:
            # Of two that nobody used in this process, the older one: the list is in order of age.
            idle = [segment for segment in self._segments if not segment.readers]
            victim = min(idle, key=lambda segment: segment.last_used, default=None)
            if victim is None or self._clock - victim.last_used < _STAYS * self.budget_bytes:
                return None
            self._forget(victim)
            return victim

    def _evict(self, segment: Segment) -> None:
        with self._lock:
            self._forget(segment)
        self._segments.remove(segment)
        self.used_bytes -= segment.disk_bytes()
        if segment is self._active:
            self._active = None
        segment.remove()

    def _forget(self, segment: Segment) -> None:
        for key in segment.keys:
            place = self._index.get(key)
            if place is not None and place.segment is segment:
                del self._index[key]

    def _next_number(self) -> int:
        return max((segment.number for segment in self._segments), default=0) + 1


def too_small(budget_bytes: int, needed_bytes: int) -> SlipstreamError:
    """The refusal of a budget that would keep nothing."""
    return SlipstreamError(
        f"The cache of hidden states may take {budget_bytes / 2**20:,.1f} MiB; that holds not even one pack, "
        f"{needed_bytes / 2**20:,.1f} MiB.",
        reason=Reason.ENVIRONMENT_UNSUPPORTED,
        remedy="Give more with --state-cache-bytes, best the states of all documents (docs/data.md says how much that "
        f"is), or leave out {FLAG}.",
    )


def _growth(segment: Segment | None, size: int) -> int:
    """Bytes on the disk that one more record takes; None: in a new segment."""
    return disk_bytes(size, 1) if segment is None else segment.disk_bytes(size) - segment.disk_bytes()
