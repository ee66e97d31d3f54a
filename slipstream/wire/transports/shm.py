"""Same host: the reader maps the server's segment read-only and copies what it needs out of it.

The server never notices a reader. A mapping outlives both the file and its owner, so a dead server harms no copy in
progress; whether its bytes still count is for ConfirmRead to say.

A reader for a GPU copies nothing: it page-locks the segment, and the GPU reads packs out of it.
"""

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.wire.arena import (
    SEGMENT_PREFIX,
    SHM_DIR_VARIABLE,
    SegmentHeader,
    read_host_id,
    shared_memory_directory,
)
from slipstream.wire.codec import ByteArray, view_bytes
from slipstream.wire.page_lock import lock_pages, unlock_pages
from slipstream.wire.transports.base import (
    ByteRun,
    PayloadReader,
    PayloadRef,
    contiguous_runs,
    damaged_twice,
    is_damaged,
)

_HEADER_READ_BYTES = 64


class SharedMemoryReader(PayloadReader):
    """Reads payloads from segments of a server on this host."""

    name = "shm"
    transport = pb.TRANSPORT_SHARED_MEMORY
    verifies_fixed_payloads = False

    def __init__(self, host_id: str, *, directory: Path | None = None, pin_memory: bool = False) -> None:
        """Make sure that this process sees the server's shared memory.

        Args:
            host_id: from GetTarget.
            directory: default: that of `shared_memory_directory`.
            pin_memory: as PayloadReader, where the segment cannot be page-locked; else packs are tensors in the
                segment itself, to be copied to the device before ConfirmRead and not to be written.

        Raises:
            SlipstreamError: TRANSPORT_UNAVAILABLE when it does not.
        """
        super().__init__(pin_memory=pin_memory)
        if not host_id:
            raise _unavailable("The target server offers no shared memory.", "Start it without --no-shm, or use grpc.")
        found = directory or shared_memory_directory()
        if found is None or read_host_id(found) != host_id:
            raise _unavailable(
                f"The target server's shared memory is not the one this process sees ({found or 'none'}).",
                f"Run both on one host with one shared-memory directory ({SHM_DIR_VARIABLE}; containers: a common "
                "/dev/shm volume), or use grpc.",
            )
        self._directory = found
        self._segments: dict[str, _Segment] = {}

    def read(self, ref: PayloadRef, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """As PayloadReader; for a GPU, tensors in the segment itself, which are the pack's until ConfirmRead."""
        location = ref.shared_memory
        if location is None or ref.time_to_live is None or not self._pin_memory:
            return super().read(ref, names)
        segment = self._segment(location.segment_name, lock=True)
        if not segment.is_locked:
            return super().read(ref, names)
        slot = segment.slot_tensor(location)
        specs = [spec for run in contiguous_runs(ref.manifest, names) for spec in run.specs]
        tensors = {spec.name: view_bytes(slot, spec) for spec in specs}
        for spec in specs:  # the small tensors; the server gives no checksums of the rest
            part = slot[spec.offset_bytes : spec.offset_bytes + spec.size_bytes].numpy()
            if is_damaged(spec, part):
                segment.slot_tensor(location)  # LEASE_LOST, when it is another payload by now
                if is_damaged(spec, part):
                    raise damaged_twice(spec, part)
        return {name: tensors[name] for name in names}

    def _fill(self, ref: PayloadRef, run: ByteRun, buffer: ByteArray) -> None:
        location = ref.shared_memory
        if location is None:
            raise _unavailable("The server did not put this payload into shared memory.", "Use grpc.")
        self._segment(location.segment_name, lock=False).copy(location, run.offset_bytes, buffer)

    def close(self) -> None:
        """Unmap all segments; idempotent."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def _segment(self, name: str, *, lock: bool) -> "_Segment":
        """`lock`: what a GPU reads again and again; asked for at the first use."""
        known = self._segments.get(name)
        if known is not None:
            return known
        for other in [other for other in self._segments if not (self._directory / other).exists()]:
            self._segments.pop(other).close()  # of a server that ended: do not hold its memory
        segment = _Segment(self._directory, name, lock=lock)
        self._segments[name] = segment
        return segment


class _Segment:
    """One mapped segment."""

    def __init__(self, directory: Path, name: str, *, lock: bool) -> None:
        """`lock`: for a GPU, whose driver locks no memory that may not be written."""
        if not name.startswith(SEGMENT_PREFIX) or os.sep in name:
            raise _corrupt(f"{name!r} is not the name of a segment.")
        try:
            access = os.O_RDWR if lock else os.O_RDONLY
            fd = os.open(directory / name, access | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise _lost(f"Segment {name} is gone: the target server has ended or was restarted.") from error
        except PermissionError as error:
            raise _unavailable(
                f"Segment {name} in {directory} may not be read: {error.strerror}.",
                "Run trainer and target server as the same user, or use grpc.",
            ) from error
        try:
            header = SegmentHeader.unpack(os.pread(fd, _HEADER_READ_BYTES, 0))
            if header is None or os.fstat(fd).st_size < header.segment_bytes:
                raise _corrupt(f"Segment {name} does not start with the header of this version.")
            # Filling the page table at once saves a page fault for every 4 KiB of the first copies.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if lock else 0)
            self._mapping = mmap.mmap(fd, header.segment_bytes, flags, protection)
        finally:
            os.close(fd)
        self._header = header
        self._bytes: ByteArray = np.frombuffer(self._mapping, np.uint8)
        self._generations = header.generations(self._bytes)
        self.is_locked = lock and lock_pages(self._bytes, effect="every pack is copied once more on its way to the GPU")
        """Whether a GPU reads from the segment itself."""

    def slot_tensor(self, location: batch_pb2.SharedMemoryLocation) -> torch.Tensor:
        """The bytes of a slot, uint8 `[slot_bytes]`, where they are."""
        index = self._slot_index(location, end=0)
        self._check_generation(index, location)
        start = location.offset_bytes
        return torch.from_numpy(self._bytes[start : start + self._header.slot_bytes])

    def copy(self, location: batch_pb2.SharedMemoryLocation, offset_bytes: int, buffer: ByteArray) -> None:
        """Fill `buffer` from byte `offset_bytes` of the payload on; the slot must hold still meanwhile."""
        header = self._header
        end = offset_bytes + buffer.nbytes
        index = self._slot_index(location, end)
        slot = self._bytes[location.offset_bytes : location.offset_bytes + header.slot_bytes]
        self._check_generation(index, location)
        np.copyto(buffer, slot[offset_bytes:end])
        self._check_generation(index, location)

    def close(self) -> None:
        unlock_pages(self._bytes)
        del self._bytes, self._generations
        with contextlib.suppress(BufferError):  # a copy is under way in another thread: it unmaps when it ends
            self._mapping.close()

    def _slot_index(self, location: batch_pb2.SharedMemoryLocation, end: int) -> int:
        """Of the slot that begins there and has at least `end` bytes."""
        header = self._header
        index, rest = divmod(location.offset_bytes - header.header_bytes, header.slot_bytes)
        if rest or not 0 <= index < header.num_slots or end > header.slot_bytes:
            raise _corrupt(f"Byte {location.offset_bytes} of segment {location.segment_name} starts no such payload.")
        return index

    def _check_generation(self, index: int, location: batch_pb2.SharedMemoryLocation) -> None:
        found = int(self._generations[index])
        if found != location.slot_generation:
            raise _lost(
                f"Slot {index} of segment {location.segment_name} was used again: generation {found}, "
                f"leased {location.slot_generation}."
            )


def _lost(message: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.LEASE_LOST, remedy="The pack is leased again.")


def _corrupt(message: str) -> SlipstreamError:
    return SlipstreamError(
        message,
        reason=Reason.PAYLOAD_CORRUPT,
        remedy="Target server and trainer must be of the same version of Slipstream.",
    )


def _unavailable(message: str, remedy: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.TRANSPORT_UNAVAILABLE, remedy=remedy)
