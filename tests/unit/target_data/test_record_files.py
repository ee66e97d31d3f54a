"""Step ①: files of every kind become the same records, and reading goes on in the middle of each."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.data_report import Finding
from target_server import record_files
from target_server.record_files import Position, Record, SourceFile, kind_of, read_records

ROWS = [{"id": f"r{number}", "messages": [{"role": "user", "content": f"é {number}"}]} for number in range(700)]


def _lines(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def _lines_of_windows(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(json.dumps(row).encode() + b"\r\n" for row in ROWS))


def _lines_gz(path: Path) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))


def _array(path: Path) -> None:
    path.write_text(json.dumps(ROWS))


def _array_laid_out(path: Path) -> None:
    path.write_text("\ufeff \n" + json.dumps(ROWS, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _array_gz(path: Path) -> None:
    path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))


def _parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=300)


def _arrow_stream(path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


def _arrow_file(path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


KINDS: dict[str, Callable[[Path], None]] = {
    writer.__name__: writer
    for writer in (
        *(_lines, _lines_of_windows, _lines_gz, _array, _array_laid_out, _array_gz),
        *(_parquet, _arrow_stream, _arrow_file),
    )
}


def value(record: Record) -> object:
    assert not isinstance(record.content, Finding), record.content
    return json.loads(record.content) if isinstance(record.content, bytes) else record.content


def read(path: Path, start: Position | None = None) -> list[Record]:
    return list(read_records(SourceFile(path, path.name), start or Position()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [7, 2**20])
def test_every_kind_gives_the_same_records(
    tmp_path: Path, kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "_CHUNK_CHARACTERS", chunk)
    path = tmp_path / "data.of-any-name"
    KINDS[kind](path)
    records = read(path)
    assert [value(record) for record in records] == ROWS
    assert [record.position.record for record in records] == list(range(1, len(ROWS) + 1))
    offsets = [record.position.offset for record in records]
    assert offsets == sorted(offsets) and 0 < offsets[-1] <= path.stat().st_size


@pytest.mark.parametrize("kind", KINDS)
def test_reading_goes_on_after_any_record(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data"
    KINDS[kind](path)
    records = read(path)
    for done in (1, 299, 300, 301, 650, 699, 700):
        rest = read(path, records[done - 1].position)
        assert [value(record) for record in rest] == ROWS[done:]
        assert [record.position for record in rest] == [record.position for record in records[done:]]


@pytest.mark.parametrize("kind", ["_array", "_array_laid_out", "_array_gz", "_lines_gz", "_parquet", "_arrow_stream"])
def test_a_file_that_breaks_off_keeps_what_came_before(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data"
    KINDS[kind](path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    records = read(path)
    assert records[-1].content in (Finding.DAMAGED_FILE, Finding.DAMAGED_GZIP)
    assert [value(record) for record in records[:-1]] == ROWS[: len(records) - 1]
    if kind != "_parquet":  # whose table of contents comes last
        assert len(records) > 100


@pytest.mark.parametrize("tail", ["] x", ", 1 2]", '"', "}"])
def test_an_array_that_is_not_one(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "data.json"
    path.write_text('[{"a": 1}, {"a": 2}' + tail)
    records = read(path)
    assert [record.content for record in records[:2]] == [{"a": 1}, {"a": 2}]
    assert records[-1].content is Finding.DAMAGED_FILE


def test_a_line_that_is_too_long_is_dropped_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "MAX_RECORD_BYTES", 100)
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 1000 + b'\n{"a": 2}\n' + b"y" * 101)
    records = read(path)
    assert [record.content for record in records] == [
        b'{"a": 1}\n',
        Finding.LINE_TOO_LONG,
        b'{"a": 2}\n',
        Finding.LINE_TOO_LONG,
    ]
    assert [record.position.record for record in records] == [1, 2, 3, 4]
    assert records[-1].position.offset == path.stat().st_size


@pytest.mark.parametrize("head", [b"\x28\xb5\x2f\xfd", b"BZh9", b"\xfd7zXZ\x00", b"PK\x03\x04"])
def test_other_compressions_are_refused_in_words(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(head + b"\x00" * 50)
    with pytest.raises(SlipstreamError, match="data.jsonl is ") as caught:
        read(path)
    assert caught.value.reason is Reason.DATA_INVALID and "Decompress" in caught.value.remedy


def test_parquet_without_pyarrow_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data.parquet"
    _parquet(path)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(SlipstreamError, match="pyarrow") as caught:
        read(path)
    assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED
    assert 'pip install "slipstream[data]"' in caught.value.remedy


def test_lines_that_begin_with_a_bracket_are_no_array(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    for text in ("[1]\n", "[[]]\n", "[]\n", ""):
        path.write_text(text)
        assert kind_of(SourceFile(path, path.name)) == ("lines", False)
