"""① First half: a file of any supported kind becomes numbered records, and reading can go on in the middle.

What a file is, its first bytes say, never its name: JSON lines and JSON arrays (both plain or gzip), Parquet, Arrow.
Records are held one at a time, columnar files in batches of rows.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.data_report import Finding

MAX_RECORD_BYTES = 64 * 2**20
"""A longer line is dropped and counted; it is never held in memory."""

_BATCH_ROWS = 256
_CHUNK_CHARACTERS = 2**20
_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_GZIP_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)
_UNSUPPORTED_MAGICS = {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}

Kind = Literal["lines", "array", "parquet", "arrow"]


@dataclass(frozen=True)
class SourceFile:
    """A file to read, and what it is called."""

    path: Path
    name: str
    """Its name, or its path below the directory that the recipe names: part of default ids and of the content hash."""

    @property
    def printable_name(self) -> str:
        """The name as UTF-8, other bytes escaped, since it becomes part of ids and JSON."""
        return self.name.encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class Position:
    """What has been read of a file."""

    record: int = 0
    """The last record's number."""
    offset: int = 0
    """Bytes of the file up to its end: exact for plain lines, else good enough to show progress."""


@dataclass(frozen=True)
class Record:
    """One conversation to be, or why there is none."""

    content: bytes | Mapping[str, Any] | object
    """JSON text, or a value that was read already; a Finding where the record could not be read."""
    position: Position
    """After it. Its number, from 1: of the line, the array's element, or the row."""


def read_records(file: SourceFile, start: Position) -> Iterator[Record]:
    """The records of a file after `start`; blank lines are counted, not yielded.

    Damage ends the file with a record that is a Finding.

    Raises:
        OSError: the file cannot be opened or read.
        SlipstreamError: DATA_INVALID for a compression that is not read; ENVIRONMENT_UNSUPPORTED without pyarrow.
    """
    kind, compressed = kind_of(file)
    if kind == "parquet":
        yield from _parquet_rows(file.path, start)
    elif kind == "arrow":
        yield from _arrow_rows(file.path, start)
    else:
        with file.path.open("rb") as raw:
            yield from _text_records(raw, kind, compressed, start)


def kind_of(file: SourceFile) -> tuple[Kind, bool]:
    """What kind of file it is, and whether gzip is around it.

    Raises:
        OSError: it cannot be read.
        SlipstreamError: DATA_INVALID for a compression that is not read.
    """
    head, compressed = _opened_head(file, 4096)
    for magic, name in _UNSUPPORTED_MAGICS.items():
        if head.startswith(magic):
            raise SlipstreamError(
                f"{file.path} is {name} data.",
                reason=Reason.DATA_INVALID,
                remedy="Decompress it; of compressed files, gzip and Parquet are read.",
            )
    if head.startswith(b"PAR1"):
        return "parquet", compressed
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow", compressed
    text = head.removeprefix(_UTF8_BOM).lstrip()
    return ("array" if text[:1] == b"[" and text[1:].lstrip()[:1] == b"{" else "lines"), compressed


def head_of(file: SourceFile) -> bytes:
    """The first bytes, decompressed; none of an empty file.

    Raises:
        OSError: it cannot be read.
    """
    return _opened_head(file, _CHUNK_CHARACTERS)[0]


def _opened_head(file: SourceFile, size: int) -> tuple[bytes, bool]:
    """The first bytes, and whether gzip is around them."""
    with file.path.open("rb") as raw:
        head = raw.read(size)
        compressed = head.startswith(_GZIP_MAGIC)
        if compressed:
            raw.seek(0)
            head = b""
            with suppress(EOFError, OSError, zlib.error):  # the damage is reported where the records are read
                stream = gzip.GzipFile(fileobj=raw)
                while len(head) < size and (more := stream.read1(size - len(head))):
                    head += more
    return head, compressed


def _text_records(raw: BufferedIOBase, kind: Kind, compressed: bool, start: Position) -> Iterator[Record]:
    position = start if kind == "lines" and not compressed else Position()
    raw.seek(position.offset)
    stream: BufferedIOBase = gzip.GzipFile(fileobj=raw) if compressed else raw
    records = _lines(stream, position) if kind == "lines" else _elements(stream)
    reached = position
    try:
        for record in records:
            reached = record.position
            if compressed or kind == "array":
                reached = Position(reached.record, raw.tell())
                record = Record(record.content, reached)
            if reached.record > start.record:
                yield record
    except _GZIP_DAMAGE:
        yield Record(Finding.DAMAGED_GZIP, Position(reached.record + 1, raw.tell()))


def _lines(stream: BufferedIOBase, position: Position) -> Iterator[Record]:
    number, offset = position.record, position.offset
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        number += 1
        offset += len(line)
        if len(line) > MAX_RECORD_BYTES and not line.endswith(b"\n"):
            while rest := stream.readline(MAX_RECORD_BYTES):
                offset += len(rest)
                if rest.endswith(b"\n"):
                    break
            yield Record(Finding.LINE_TOO_LONG, Position(number, offset))
            continue
        text = line.removeprefix(_UTF8_BOM) if number == 1 else line
        if text and not text.isspace():
            yield Record(text, Position(number, offset))


def _elements(stream: BufferedIOBase) -> Iterator[Record]:
    """The elements of one JSON array, however it is laid out. Damage ends it: what follows cannot be told apart."""
    text = _ArrayText(stream)
    number = 0
    text.skip("[")
    while True:
        try:
            value = text.next_element()
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            yield Record(Finding.DAMAGED_FILE, Position(number + 1))
            return
        if value is _END:
            return
        number += 1
        yield Record(value, Position(number))


_END = object()


class _ArrayText:
    """Decodes one element after the other from a stream, holding about one chunk and one element."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._parse = json.JSONDecoder().raw_decode
        self._text = ""
        self._at = 0
        self._begun = False
        self._ended = False
        self._damage: Exception | None = None

    def next_element(self) -> object:
        """The next value; _END after the last. Raises ValueError where the array is broken."""
        if self._peek() == "]":
            self._at += 1
            if self._peek():
                raise ValueError("something follows the array")
            return _END
        if self._begun:
            self.skip(",")
        self._begun = True
        return self._value()

    def skip(self, character: str) -> None:
        """Step over what must come next. Raises ValueError where something else does."""
        if self._peek() != character:
            raise ValueError(f"no {character!r}")
        self._at += 1

    def _value(self) -> object:
        """One JSON value. Reads on until it is whole; each time twice as much, so that long values stay linear."""
        self._peek()
        while True:
            try:
                value, end = self._parse(self._text, self._at)
            except ValueError:
                if not self._read_more(max(_CHUNK_CHARACTERS, len(self._text) - self._at)):
                    raise
                continue
            if end < len(self._text) or not self._read_more(_CHUNK_CHARACTERS):  # a number may go on in the next chunk
                self._at = end
                return value

    def _peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self._at += 1
            if not self._read_more(_CHUNK_CHARACTERS):
                return ""

    def _read_more(self, size: int) -> bool:
        """Take another `size` bytes in; False at the end, and where one value takes more than a record may."""
        if self._ended or len(self._text) - self._at > MAX_RECORD_BYTES:
            return False
        data = self._read(size)
        self._ended = not data
        self._text = self._text[self._at :] + self._decode(data, final=self._ended)
        self._at = 0
        return not self._ended

    def _read(self, size: int) -> bytes:
        """Up to `size` bytes; what came before damaged gzip data is given before the damage is raised."""
        if self._damage is not None:
            raise self._damage
        data = bytearray()
        try:
            while len(data) < size and (piece := self._stream.read1(size - len(data))):
                data += piece
        except _GZIP_DAMAGE as damage:
            if not data:
                raise
            self._damage = damage
        return bytes(data)


def _parquet_rows(path: Path, start: Position) -> Iterator[Record]:
    arrow = _pyarrow()
    import pyarrow.parquet

    size, number = path.stat().st_size, 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            counts = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
            first = 0
            while first < len(counts) and number + counts[first] <= start.record:
                number += counts[first]
                first += 1
            total = max(1, sum(counts))
            batches = file.iter_batches(_BATCH_ROWS, row_groups=list(range(first, len(counts))), use_threads=False)
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    if number > start.record:
                        yield Record(row, Position(number, size * number // total))
    except (arrow.ArrowException, OSError) as error:
        _reraise_unless_damage(path, error)
        yield Record(Finding.DAMAGED_FILE, Position(number + 1, size))


def _arrow_rows(path: Path, start: Position) -> Iterator[Record]:
    """Rows of Arrow's streaming format (what `save_to_disk` of Hugging Face datasets writes) and file format."""
    arrow = _pyarrow()
    size, number = path.stat().st_size, 0
    try:
        with arrow.memory_map(str(path)) as source:
            for batch in _arrow_batches(arrow, source):
                if number + batch.num_rows <= start.record:
                    number += batch.num_rows
                    continue
                for begin in range(0, batch.num_rows, _BATCH_ROWS):
                    for row in batch.slice(begin, _BATCH_ROWS).to_pylist():
                        number += 1
                        if number > start.record:
                            yield Record(row, Position(number, source.tell()))
    except (arrow.ArrowException, OSError) as error:
        _reraise_unless_damage(path, error)
        yield Record(Finding.DAMAGED_FILE, Position(number + 1, size))


def _arrow_batches(arrow: Any, source: Any) -> Iterator[Any]:
    if source.read(6) == b"ARROW1":
        file = arrow.ipc.open_file(source)
        yield from (file.get_batch(index) for index in range(file.num_record_batches))
    else:
        source.seek(0)
        yield from arrow.ipc.open_stream(source)


def _reraise_unless_damage(path: Path, error: Exception) -> None:
    """pyarrow reports damage as OSError, too; one with an errno, or a file that cannot be opened, is none."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error
    with path.open("rb"):
        pass


def _pyarrow() -> Any:
    try:
        import pyarrow as arrow
        import pyarrow.ipc
    except ImportError:
        raise SlipstreamError(
            "Parquet and Arrow files are read with pyarrow, which is not installed.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy='Install it: pip install "slipstream[data]"',
        ) from None
    return arrow
