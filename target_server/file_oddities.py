"""① What is unusual about a file as a whole, for the report: nothing here keeps it from being read."""

from collections.abc import Iterator
from itertools import islice
from pathlib import PurePath

from slipstream.wire.data_report import Finding
from target_server.conversations import RecordFormat, layout_of
from target_server.messages import BadRecordError
from target_server.record_files import Kind, Position, SourceFile, head_of, kind_of, read_records

_SUFFIXES: dict[str, tuple[Kind, ...]] = {
    ".jsonl": ("lines",),
    ".ndjson": ("lines",),
    ".json": ("array", "lines"),
    ".parquet": ("parquet",),
    ".arrow": ("arrow",),
}
_RECORDS_LOOKED_AT = 20


def oddities(file: SourceFile) -> Iterator[tuple[Finding, str]]:
    """Findings about a file, each with the place to look at.

    Raises:
        OSError: it cannot be read.
        SlipstreamError: as `kind_of`.
    """
    name = file.printable_name
    head = head_of(file)
    if not head:
        yield Finding.EMPTY_FILE, name
        return
    kind, _ = kind_of(file)
    suffix = PurePath(file.name.lower().removesuffix(".gz")).suffix
    if kind not in _SUFFIXES.get(suffix, ()):
        yield Finding.WRONG_SUFFIX, name
    if kind in ("lines", "array"):
        if head.startswith(b"\xef\xbb\xbf"):
            yield Finding.BYTE_ORDER_MARK, f"{name}:1"
        if b"\r\n" in head:
            yield Finding.CRLF_LINES, f"{name}:1"


def first_layout(file: SourceFile) -> RecordFormat | None:
    """The layout of a file's first records, which the others are compared with; None where none of them has any.

    Raises:
        OSError: it cannot be read.
        SlipstreamError: as `kind_of`.
    """
    for record in islice(read_records(file, Position()), _RECORDS_LOOKED_AT):
        try:
            return layout_of(record.content)
        except BadRecordError:
            continue
    return None
