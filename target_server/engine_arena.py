"""Segments of the server's shared memory as an engine process sees them: mapped once, written into, given back.

The server owns a segment and decides which slot is whose. What an engine writes counts once the server has published
it, so one that dies in a write has harmed nothing: the server makes the slot's generation even again.
"""

import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.hidden_states.v1 import tensor_pb2
from slipstream.wire.arena import PayloadArena, SegmentHeader
from slipstream.wire.codec import ByteArray, PayloadLayout
from slipstream.wire.page_lock import lock_pages, unlock_pages

_HEADER_READ_BYTES = 64


class MappedArena:
    """Another process's PayloadArena, for writing. One thread at a time."""

    def __init__(self, path: Path, *, for_gpu: bool) -> None:
        """Map the segment; `for_gpu`: this process's GPU writes into it.

        Raises:
            OSError: it is not there.
        """
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            header = SegmentHeader.unpack(os.pread(fd, _HEADER_READ_BYTES, 0))
            assert header is not None, f"{path} is no segment of this version"
            self._mapping = mmap.mmap(fd, header.segment_bytes)
        finally:
            os.close(fd)
        self._header = header
        self._bytes: ByteArray = np.frombuffer(self._mapping, np.uint8)
        self._generations = header.generations(self._bytes)
        if for_gpu:
            lock_pages(self._slots(), effect="copies from the GPU are about three times slower")

    def slot(self, index: int) -> ByteArray:
        """The bytes of a slot, uint8, writable."""
        start = self._header.header_bytes + index * self._header.slot_bytes
        return self._bytes[start : start + self._header.slot_bytes]

    def generation(self, index: int) -> int:
        """Odd while being written."""
        return int(self._generations[index])

    def begin_write(self, index: int) -> None:
        """Make every earlier content of the slot invalid for its readers."""
        assert self.generation(index) % 2 == 0, f"slot {index} is being written already"
        self._generations[index] += np.uint64(1)

    def end_write(self, index: int) -> None:
        """Declare the slot's content complete."""
        assert self.generation(index) % 2 == 1, f"slot {index} is not being written"
        self._generations[index] += np.uint64(1)

    def close(self) -> None:
        """Give the memory back."""
        unlock_pages(self._slots())
        del self._bytes, self._generations
        with suppress(BufferError):  # a view of a slot is still in use: the last one frees the memory
            self._mapping.close()

    def _slots(self) -> ByteArray:
        start = self._header.header_bytes
        return self._bytes[start : start + self._header.num_slots * self._header.slot_bytes]


def repair(arena: PayloadArena, index: int) -> None:
    """End the write of a slot whose writer has died; nobody reads the slot, and no earlier reader may trust it."""
    if arena.generation(index) % 2:
        arena.end_write(index)


def segment_of(arena: PayloadArena) -> str:
    """Name of the segment; the arena lies in shared memory."""
    location = arena.location(0)
    assert location is not None, "engine processes need shared memory"
    return location.segment_name


def layout_fields(layout: PayloadLayout) -> list[list[Any]]:
    """A layout as JSON."""
    return [
        [spec.name, int(spec.data_type), list(spec.shape), spec.offset_bytes, spec.size_bytes] for spec in layout.specs
    ]


def read_layout(fields: Iterable[Sequence[Any]], size_bytes: int) -> PayloadLayout:
    """What `layout_fields` wrote."""
    specs = [
        tensor_pb2.TensorSpec(name=name, data_type=kind, shape=shape, offset_bytes=offset, size_bytes=size)
        for name, kind, shape, offset, size in fields
    ]
    return PayloadLayout(tuple(specs), size_bytes)
