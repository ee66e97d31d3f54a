"""Lines by number: torn ones, long ones, positions that go back and forth."""

from pathlib import Path

import pytest

from drafter_trainer.agent.line_tail import LineTail, last_line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines"


def read(tail: LineTail, first: int, limit: int = 100, max_bytes: int = 1000) -> list[bytes]:
    return tail.read(first, limit=limit, max_bytes=max_bytes).lines


def test_a_torn_line_is_not_there_yet(path: Path) -> None:
    tail = LineTail(path)
    assert read(tail, 0) == []
    path.write_bytes(b"zero\none\ntw")
    assert read(tail, 0) == [b"zero", b"one"]
    assert read(tail, 2) == []
    with path.open("ab") as file:
        file.write(b"o\nthree")
    found = tail.read(2, limit=9, max_bytes=1000)
    assert (found.first, found.lines, found.next, found.reach_end) == (2, [b"two"], 3, True)


def test_a_torn_line_that_is_cut_off_and_written_anew(path: Path) -> None:
    path.write_bytes(b"zero\none\ntorn by a cra")
    tail = LineTail(path)
    assert read(tail, 0) == [b"zero", b"one"]
    path.write_bytes(b"zero\none\ntwo\n")
    assert read(tail, 2) == [b"two"]


def test_limits_in_lines_and_bytes(path: Path) -> None:
    path.write_bytes(b"".join(b"%03d\n" % number for number in range(100)))
    tail = LineTail(path)
    some = tail.read(0, limit=7, max_bytes=1000)
    assert len(some.lines) == 7 and not some.reach_end
    assert read(tail, some.next, limit=100, max_bytes=40) == [b"%03d" % number for number in range(7, 17)]
    exactly_all = tail.read(90, limit=10, max_bytes=1000)
    assert len(exactly_all.lines) == 10 and exactly_all.reach_end


def test_a_line_longer_than_the_limit_is_cut_and_counted_once(path: Path) -> None:
    path.write_bytes(b"a\n" + b"b" * 5000 + b"\nc\n")
    tail = LineTail(path)
    assert read(tail, 0, max_bytes=100) == [b"a"]
    assert read(tail, 1, max_bytes=100) == [b"b" * 100]
    assert read(tail, 2, max_bytes=100) == [b"c"]


def test_positions_go_back_and_forth(path: Path) -> None:
    path.write_bytes(b"".join(b"%d\n" % number for number in range(50)))
    tail = LineTail(path)
    for first in (40, 0, 49, 10, 10, 11, 0):
        assert read(tail, first, limit=1) == [b"%d" % first]
    beyond = tail.read(60, limit=1, max_bytes=10)
    assert (beyond.lines, beyond.reach_end) == ([], True)
    assert read(tail, 0, limit=1) == [b"0"]


def test_a_file_that_began_anew(path: Path) -> None:
    path.write_bytes(b"old\nolder\n")
    tail = LineTail(path)
    assert read(tail, 1) == [b"older"]
    path.write_bytes(b"new\n")
    assert read(tail, 1) == []
    assert read(tail, 0) == [b"new"]


def test_what_cannot_be_read_has_no_lines(tmp_path: Path) -> None:
    assert LineTail(tmp_path).read(3, limit=1, max_bytes=1).lines == []
    assert last_line(tmp_path) == (b"", 0)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", (b"", 0)),
        (b"torn", (b"", 0)),
        (b"one\n", (b"one", 4)),
        (b"one\ntwo\ntorn", (b"two", 8)),
        (b"x" * 300 + b"\nlast\n", (b"last", 306)),
        (b"a\n" + b"x" * 50, (b"a", 2)),
    ],
)
def test_the_last_line(path: Path, content: bytes, expected: tuple[bytes, int]) -> None:
    path.write_bytes(content)
    assert last_line(path, longest=64) == expected
