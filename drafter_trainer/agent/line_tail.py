"""Lines of a file that only grows, by number. A line without its line break is not there yet."""

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_BLOCK = 2**20


@dataclass(frozen=True)
class Lines:
    """Consecutive lines, without their line breaks."""

    first: int
    """Number of the first one, zero-based."""
    lines: list[bytes]
    reach_end: bool
    """Nothing followed when they were read."""

    @property
    def next(self) -> int:
        """The number that follows."""
        return self.first + len(self.lines)


class LineTail:
    """Remembers where a line begins, so that reading on costs what is new. May be set back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        self._offset = 0

    def read(self, first: int, *, limit: int, max_bytes: int) -> Lines:
        """At most `limit` lines and about `max_bytes`, from line `first` on.

        A line longer than `max_bytes` is cut to that. A file that is not there, or cannot be read, has no lines.
        """
        try:
            with self._path.open("rb") as file:
                return self._read(file, first, limit, max_bytes)
        except OSError:
            return Lines(first, [], reach_end=True)

    def _read(self, file: BinaryIO, first: int, limit: int, max_bytes: int) -> Lines:
        if first < self._number or file.seek(0, 2) < self._offset:
            self._number = self._offset = 0
        file.seek(self._offset)
        while self._number < first:
            skipped = _next_line(file, max_bytes)
            if skipped is None:
                return Lines(first, [], reach_end=True)
            self._number += 1
            self._offset += skipped[1]
        found: list[bytes] = []
        room = max_bytes
        while (one := _next_line(file, max_bytes)) is not None:
            line, size = one
            if len(found) == limit or (found and size > room):
                return Lines(first, found, reach_end=False)
            found.append(line)
            room -= size
        return Lines(first, found, reach_end=True)


def last_line(path: Path, *, longest: int = 2**16) -> tuple[bytes, int]:
    """(the last complete line, where it ends in bytes); empty and 0 where there is none."""
    try:
        with path.open("rb") as file:
            begin = max(0, file.seek(0, 2) - 2 * longest)
            file.seek(begin)
            whole = file.read().rpartition(b"\n")[0]
    except OSError:
        return b"", 0
    if not whole:
        return b"", 0
    return whole.rpartition(b"\n")[2], begin + len(whole) + 1


def _next_line(file: BinaryIO, longest: int) -> tuple[bytes, int] | None:
    """(the line, cut to `longest`; bytes that it takes in the file); None where no complete line follows."""
    line = part = file.readline(longest)
    size = len(part)
    while part and not part.endswith(b"\n"):
        part = file.readline(_BLOCK)
        size += len(part)
    return (line.removesuffix(b"\n"), size) if part else None
