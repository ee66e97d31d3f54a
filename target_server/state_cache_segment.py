"""⑤ One segment of the cache of hidden states: records behind each other, and a list of where they lie.

    NNNNNNNN.states   records, as raw bytes
    NNNNNNNN.index    one entry a record: key, offset, size, crc32c of the record, crc32c of the entry itself

A record is written before its entry, and an entry that is not whole does not count. So a process may be killed between
any two instructions: what is left is a segment that lacks its last record. After a power cut an entry may be there
whose record is not; every reading compares the record with its checksum.
"""

import contextlib
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import google_crc32c

from slipstream.wire.codec import ByteArray, align, checksum

DATA_SUFFIX = ".states"
INDEX_SUFFIX = ".index"
KEY_BYTES = 16
ENTRY_BYTES = 40
_FIELDS = struct.Struct("<16sQQI")  # key, offset, size, crc32c of the record
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies."""

    segment: "Segment"
    offset: int
    size: int
    crc: int


@dataclass(eq=False)
class Segment:
    """Two open files. One thread appends; any may read what was appended."""

    directory: Path
    number: int
    data_fd: int
    index_fd: int
    end: int = 0
    """Bytes of records."""
    entries: int = 0
    keys: list[bytes] = field(default_factory=list)
    """Of all records, oldest first."""
    readers: int = 0
    """While there are any, the files stay."""
    last_used: float = float("-inf")
    """By the store's clock; what no one has used since the server started is the oldest."""

    @classmethod
    def create(cls, directory: Path, number: int) -> "Segment":
        """A new, empty one.

        Raises:
            OSError: the disk does not take it; no file is left then.
        """
        paths = data_path(directory, number), index_path(directory, number)
        opened: list[int] = []
        try:
            opened.extend(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644) for path in paths)
        except OSError:
            for path in paths:
                path.unlink(missing_ok=True)
            for fd in opened:
                os.close(fd)
            raise
        data_fd, index_fd = opened
        return cls(directory, number, data_fd, index_fd)

    @classmethod
    def open(cls, directory: Path, number: int) -> tuple["Segment", list[tuple[bytes, Place]]]:
        """An earlier process's, with its keys and places, oldest first. What was not finished is cut off.

        Raises:
            OSError: the files cannot be opened or shortened.
        """
        data_fd, index_fd = (
            os.open(path(directory, number), os.O_RDWR | os.O_CREAT, 0o644) for path in (data_path, index_path)
        )
        segment = cls(directory, number, data_fd, index_fd)
        size, raw = os.fstat(data_fd).st_size, index_path(directory, number).read_bytes()
        segment.entries = len(raw) // ENTRY_BYTES
        found = []
        for position in range(0, segment.entries * ENTRY_BYTES, ENTRY_BYTES):
            entry = _unpack(raw[position : position + ENTRY_BYTES])
            if entry is None or entry[1] + entry[2] > size:  # damaged, or its record is not there
                continue
            key, offset, length, crc = entry
            segment.end = max(segment.end, offset + length)
            segment.keys.append(key)
            found.append((key, Place(segment, offset, length, crc)))
        # Appending goes on from the end of both files.
        if len(raw) != segment.entries * ENTRY_BYTES:
            os.ftruncate(index_fd, segment.entries * ENTRY_BYTES)
        if size != segment.end:
            os.ftruncate(data_fd, segment.end)
        return segment, found

    @property
    def path(self) -> Path:
        """Of the records."""
        return data_path(self.directory, self.number)

    @property
    def modified_ns(self) -> int:
        """When the records were last written or used, by any process."""
        return os.fstat(self.data_fd).st_mtime_ns

    def touch(self, clock: float) -> None:
        """Note that records are used: for this process, and for the one after it."""
        self.last_used = clock
        with contextlib.suppress(OSError):  # a disk that has become read-only still gives what lies on it
            os.utime(self.data_fd)

    def append(self, key: bytes, record: ByteArray) -> Place:
        """Write a record (uint8, contiguous), then its entry.

        Raises:
            OSError: the disk does not take it; the segment is as it was.
        """
        place = Place(self, self.end, len(record), checksum(record))
        try:
            write_all(self.data_fd, record.data, self.end)
            write_all(self.index_fd, memoryview(_pack(key, place)), self.entries * ENTRY_BYTES)
        except OSError:
            with contextlib.suppress(OSError):  # a disk that fails altogether: what is behind the end never counts
                os.ftruncate(self.data_fd, self.end)
                os.ftruncate(self.index_fd, self.entries * ENTRY_BYTES)
            raise
        self.end += place.size
        self.entries += 1
        self.keys.append(key)
        return place

    def read(self, place: Place, buffer: ByteArray) -> bool:
        """Fill `buffer` (uint8 `[size]`, contiguous) with a record; False when the disk does not give what was written.

        `pread`, not a mapping: a file that became shorter must not be a SIGBUS.
        """
        filled = 0
        view = buffer.data
        while filled < place.size:
            try:
                got = os.preadv(self.data_fd, [view[filled:]], place.offset + filled)
            except OSError:
                return False
            if not got:
                return False
            filled += got
        return checksum(buffer) == place.crc

    def disk_bytes(self, more: int = 0) -> int:
        """What the files take, or would with one more record of `more` bytes."""
        return disk_bytes(self.end + more, self.entries + (1 if more else 0))

    def close(self) -> None:
        """Close the files."""
        os.close(self.data_fd)
        os.close(self.index_fd)

    def remove(self) -> None:
        """Close and delete the files. The entries go last: records without entries are nothing."""
        self.close()
        index_path(self.directory, self.number).unlink(missing_ok=True)
        data_path(self.directory, self.number).unlink(missing_ok=True)


def disk_bytes(record_bytes: int, entries: int) -> int:
    """What a segment takes on the disk: whole blocks."""
    return align(record_bytes, _BLOCK) + align(entries * ENTRY_BYTES, _BLOCK)


def data_path(directory: Path, number: int) -> Path:
    """Of a segment's records."""
    return directory / f"{number:08d}{DATA_SUFFIX}"


def index_path(directory: Path, number: int) -> Path:
    """Of a segment's entries."""
    return directory / f"{number:08d}{INDEX_SUFFIX}"


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, however often the kernel takes only a part.

    Raises:
        OSError: the disk does not take it; a part may be written.
    """
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], offset + written)


def _pack(key: bytes, place: Place) -> bytes:
    fields = _FIELDS.pack(key, place.offset, place.size, place.crc)
    return fields + int(google_crc32c.value(fields)).to_bytes(4, "little")


def _unpack(entry: bytes) -> tuple[bytes, int, int, int] | None:
    """Key, offset, size and checksum; None for an entry that is damaged."""
    fields = entry[: _FIELDS.size]
    if int(google_crc32c.value(fields)).to_bytes(4, "little") != entry[_FIELDS.size :]:
        return None
    key, offset, size, crc = _FIELDS.unpack(fields)
    return key, offset, size, crc
