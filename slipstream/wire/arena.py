"""Memory for payloads: fixed slots in one pre-faulted segment that other processes can map and read.

File layout: one header (magic, version, sizes, then one generation per slot), padded to whole pages, then the slots.
A slot's generation is odd while it is being written, so a reader that finds the same even number before and after its
copy has most likely read one payload. The lease ledger (ConfirmRead) has the last word.

The owner holds an exclusive flock on its segment for as long as it lives; the kernel drops it with the process, however
it dies and whatever PID namespace it lived in. A segment whose lock can be taken is therefore stale.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.wire.codec import ByteArray, align

MAGIC = b"SLIPARNA"
VERSION = 2
SHM_DIR_VARIABLE = "SLIPSTREAM_SHM_DIR"
_DEFAULT_SHM_DIR = Path("/dev/shm")
SEGMENT_PREFIX = "slipstream-segment-"
_MARKER = "slipstream-host"
_HEADER = struct.Struct("<8sQQQ")  # magic, version, slots, bytes per slot
_GENERATIONS_OFFSET = 64
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first bytes of a segment."""

    num_slots: int
    slot_bytes: int
    """Bytes from one slot to the next; a multiple of the page size."""

    @property
    def header_bytes(self) -> int:
        """Bytes before the first slot."""
        return align(_GENERATIONS_OFFSET + 8 * self.num_slots, _PAGE)

    @property
    def segment_bytes(self) -> int:
        """Bytes of the whole segment."""
        return self.header_bytes + self.num_slots * self.slot_bytes

    def pack(self) -> bytes:
        """As written at the start of the segment."""
        return _HEADER.pack(MAGIC, VERSION, self.num_slots, self.slot_bytes)

    @classmethod
    def unpack(cls, raw: bytes) -> "SegmentHeader | None":
        """None when the bytes are not the header of a segment of this version."""
        if len(raw) < _HEADER.size:
            return None
        magic, version, *fields = _HEADER.unpack_from(raw)
        return cls(*fields) if (magic, version) == (MAGIC, VERSION) else None

    def generations(self, segment: ByteArray) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """The generation of every slot, uint64 `[num_slots]`, sharing memory with the segment."""
        return segment[_GENERATIONS_OFFSET : _GENERATIONS_OFFSET + 8 * self.num_slots].view(np.uint64)


class PayloadArena:
    """Fixed slots of pre-faulted memory, written by this process and readable by others on the host.

    One thread writes a slot at a time; `begin_write` and `end_write` bracket the write.
    """

    def __init__(self, header: SegmentHeader, mapping: mmap.mmap, lock_fd: int | None, path: Path | None) -> None:
        """Use `create`."""
        self._header = header
        self._mapping: mmap.mmap | None = mapping
        self._lock_fd = lock_fd
        self._path = path
        self._bytes: ByteArray = np.frombuffer(mapping, np.uint8)
        self._bytes[::_PAGE] = 0  # the first touch of a page costs 10x a copy: pay it now, not in the first packs
        self._generations = header.generations(self._bytes)
        self._bytes[: _HEADER.size] = np.frombuffer(header.pack(), np.uint8)

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int, *, directory: Path | None) -> "PayloadArena":
        """Reserve all memory at once, so that no later write can fail.

        Args:
            num_slots: how many payloads are held at once.
            slot_bytes: size of the largest payload.
            directory: the shared-memory directory, or None for memory private to this process (gRPC only).

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED when the directory is not usable or the memory is not there.
        """
        assert num_slots > 0 and slot_bytes > 0, (num_slots, slot_bytes)
        header = SegmentHeader(num_slots, align(slot_bytes, _PAGE))
        if directory is None:
            return cls(header, _map_anonymous(header.segment_bytes), None, None)
        remove_stale_segments(directory)
        path, fd = _create_file(directory)
        try:
            _reserve(fd, header.segment_bytes, directory)
            mapping = mmap.mmap(fd, header.segment_bytes)
        except BaseException:
            path.unlink()
            os.close(fd)
            raise
        return cls(header, mapping, fd, path)

    @property
    def is_closed(self) -> bool:
        """Whether the memory was given back."""
        return self._mapping is None

    @property
    def num_slots(self) -> int:
        """Slots in the arena."""
        return self._header.num_slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, at least what `create` was asked for."""
        return self._header.slot_bytes

    def slot(self, index: int) -> ByteArray:
        """The bytes of a slot, uint8 `[slot_bytes]`, writable."""
        start = self._slot_offset(index)
        return self._bytes[start : start + self.slot_bytes]

    def slots(self) -> ByteArray:
        """The bytes of all slots, one after the other."""
        start = self._slot_offset(0)
        return self._bytes[start : start + self.num_slots * self.slot_bytes]

    def generation(self, index: int) -> int:
        """How often the slot's state changed: odd while being written, 0 before the first write."""
        return int(self._generations[index])

    def begin_write(self, index: int) -> None:
        """Make every earlier content of the slot invalid for its readers."""
        assert self.generation(index) % 2 == 0, f"slot {index} is being written already"
        self._generations[index] += np.uint64(1)

    def end_write(self, index: int) -> None:
        """Declare the slot's content complete."""
        assert self.generation(index) % 2 == 1, f"slot {index} is not being written"
        self._generations[index] += np.uint64(1)

    def location(self, index: int) -> pb.SharedMemoryLocation | None:
        """Where another process finds the slot's present content; None for private memory."""
        if self._path is None:
            return None
        return pb.SharedMemoryLocation(
            segment_name=self._path.name,
            offset_bytes=self._slot_offset(index),
            slot_generation=self.generation(index),
        )

    def close(self) -> None:
        """Unlink the segment and give the memory back; idempotent. Processes that mapped it keep their mapping."""
        if self._mapping is None:
            return
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
        mapping, self._mapping = self._mapping, None
        del self._bytes, self._generations
        with contextlib.suppress(BufferError):  # a view of a slot is still in use: the last one frees the memory
            mapping.close()

    def _slot_offset(self, index: int) -> int:
        assert 0 <= index < self.num_slots, f"slot {index} of {self.num_slots}"
        return self._header.header_bytes + index * self.slot_bytes


def shared_memory_directory() -> Path | None:
    """Where segments live: $SLIPSTREAM_SHM_DIR, else /dev/shm, else None where that does not exist.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED when the variable names something that is not a writable directory.
    """
    configured = os.environ.get(SHM_DIR_VARIABLE)
    if configured:
        check_shared_memory_directory(Path(configured))
        return Path(configured)
    usable = _DEFAULT_SHM_DIR.is_dir() and os.access(_DEFAULT_SHM_DIR, os.R_OK | os.W_OK | os.X_OK)
    return _DEFAULT_SHM_DIR if usable else None


def create_host_id(directory: Path) -> str:
    """The identity of a shared-memory directory on a running kernel; the marker file is made when missing.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED when the directory is not writable.
    """
    check_shared_memory_directory(directory)
    draft = directory / f".{_MARKER}-{secrets.token_hex(8)}"
    try:
        draft.write_text(secrets.token_hex(16))
        draft.chmod(0o644)
        with contextlib.suppress(FileExistsError):  # another server was first: its marker is everybody's
            os.link(draft, directory / _MARKER)
    except OSError as error:
        raise SlipstreamError(
            f"The shared-memory directory {directory} takes no file: {error.strerror}.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Free some of it, make it larger (containers: --shm-size or a tmpfs volume), or serve over gRPC "
            "only with --no-shm.",
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    host_id = read_host_id(directory)
    assert host_id is not None
    return host_id


def read_host_id(directory: Path) -> str | None:
    """What `create_host_id` returned in the process that shares this directory; None without a marker.

    The kernel's boot id is part of it: a marker that was copied, or lies on a network file system, must not make two
    hosts look like one.
    """
    try:
        marker = (directory / _MARKER).read_text()
    except OSError:
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{marker}.{boot}"


def remove_stale_segments(directory: Path) -> list[str]:
    """Remove the segments of dead processes; returns their names.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED when the directory is not usable.
    """
    check_shared_memory_directory(directory)
    removed = []
    for path in sorted(directory.glob(f"{SEGMENT_PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # gone meanwhile, or another user's: not ours to judge
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:  # the owner lives
            continue
        finally:
            os.close(fd)
    return removed


def _create_file(directory: Path) -> tuple[Path, int]:
    """A new segment file, locked. A cleaner may unlink it between creation and lock: then once more."""
    while True:
        path = directory / f"{SEGMENT_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)


def _reserve(fd: int, size_bytes: int, directory: Path) -> None:
    """Take all pages now: writing to a sparse file on a full tmpfs would kill the process with SIGBUS."""
    file_system = os.statvfs(directory)
    free, total = file_system.f_bavail * file_system.f_frsize, file_system.f_blocks * file_system.f_frsize
    full = SlipstreamError(
        f"A segment needs {_mib(size_bytes)} of shared memory; {directory} has {_mib(free)} free of {_mib(total)}.",
        reason=Reason.ENVIRONMENT_UNSUPPORTED,
        remedy="Make it larger (containers: --shm-size or a tmpfs volume), make the shelf smaller with "
        "--shelf-bytes, or serve over gRPC only with --no-shm.",
    )
    if size_bytes > free and total:  # total is 0 for a tmpfs without a limit
        raise full
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:  # another process was faster, or memory is short though the file system is not
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
            raise
        raise full from error


def _map_anonymous(size_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise SlipstreamError(
            f"A segment needs {_mib(size_bytes)} of memory, which this machine does not give: {error.strerror}.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Make the shelf smaller with --shelf-bytes.",
        ) from error


def check_shared_memory_directory(directory: Path) -> None:
    """Refuse what segments cannot live in.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED.
    """
    if not (directory.is_dir() and os.access(directory, os.R_OK | os.W_OK | os.X_OK)):
        raise SlipstreamError(
            f"The shared-memory directory {directory} "
            f"{'is not writable' if directory.is_dir() else 'does not exist or is not a directory'}.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy=f"Name another with --shm-dir or {SHM_DIR_VARIABLE}, or serve over gRPC only with --no-shm.",
        )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
