"""Tables that fit, times and numbers for people, and nothing that steers a terminal."""

import os
import pty
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from slipstream.cli import display
from slipstream.cli.display import Column, duration, local_time, measure, print_fields, print_table, printable

COLUMNS = (
    Column("NAME", may_wrap=True),
    Column("STATE"),
    Column("LOSS", is_number=True, rank=1),
    Column("HOST", rank=2),
)
ROWS = (("demo", "RUNNING", "0.024", "box"), ("漢字の名前", "FAILED", "-", "a-rather-long-name-of-a-host"))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "-"),
        (-3, "0s"),
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m 0s"),
        (192, "3m 12s"),
        (7500, "2h 5m"),
        (3 * 86400 + 4 * 3600 + 59, "3d 4h"),
    ],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_times_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    display.time.tzset()
    try:
        assert local_time("2026-01-01T20:00:00.000+00:00") == "2026-01-02 05:00:00"
    finally:
        monkeypatch.undo()
        display.time.tzset()
    assert local_time(None) == "-"


def test_numbers() -> None:
    assert [measure(value) for value in (1234.5, 7, None, True, "7", [])] == ["1,234.500", "7.000", "-", "-", "-", "-"]


def test_a_table_in_a_pipe_is_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table(COLUMNS, ROWS)
    assert capsys.readouterr().out == (
        "NAME        STATE     LOSS  HOST\n"
        "demo        RUNNING  0.024  box\n"
        "漢字の名前  FAILED       -  a-rather-long-name-of-a-host\n"
    )


def test_text_of_others_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([Column("A")], [("\x1b[2J\nx[red]",)])
    assert capsys.readouterr().out == "A\n\\x1b[2J x[red]\n"
    print_fields({"name": "a\x07b", "empty": "", "two": "first\nsecond"})
    assert capsys.readouterr().out == "name   a\\x07b\ntwo    first\n       second\n"
    assert printable("\x9b1m\ttab") == "\\x9b1m\ttab"


def on_a_terminal(script: str, columns: int, **environment: str) -> str:
    """What a script prints on a terminal of so many columns."""
    source = "from slipstream.cli.display import *\n" + textwrap.dedent(script)
    size = {"COLUMNS": str(columns), "LINES": "24", "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ours, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=terminal, stdin=terminal, env=kept | path | size | environment
    ) as child:
        os.close(terminal)
        printed = b""
        try:
            while block := os.read(ours, 4096):
                printed += block
        except OSError:  # the other end is closed
            pass
        assert child.wait(30) == 0, printed
    os.close(ours)
    return printed.decode().replace("\r\n", "\n")


TABLE = f"print_table({COLUMNS!r}, {ROWS!r})"


def test_colours_on_a_terminal_unless_they_are_not_wanted() -> None:
    assert "\x1b[32mRUNNING" in on_a_terminal(TABLE, 100)
    assert "\x1b[3" not in on_a_terminal(TABLE, 100, NO_COLOR="1")
    assert "\x1b" not in on_a_terminal(TABLE, 100, TERM="dumb")


@pytest.mark.parametrize(
    ("width", "titles"),
    [(100, ["NAME", "STATE", "LOSS", "HOST"]), (40, ["NAME", "STATE", "LOSS"]), (20, ["NAME", "STATE"])],
)
def test_a_narrow_terminal_loses_what_matters_least(width: int, titles: list[str]) -> None:
    lines = on_a_terminal(TABLE, width, TERM="dumb").splitlines()
    assert lines[0].split() == titles
    assert len(lines) == 3


def test_a_very_narrow_terminal_wraps_names() -> None:
    lines = on_a_terminal(TABLE, 14, TERM="dumb").splitlines()
    assert "RUNNING" in lines[1]
    assert "".join(line[:5].strip() for line in lines[2:]).replace(" ", "").startswith("漢字")


def test_no_column_that_matters_ever_vanishes() -> None:
    lines = on_a_terminal(TABLE, 8, TERM="dumb").splitlines()
    assert lines[0].split() == ["NAME", "STATE"]
    assert lines[1].split() == ["demo", "RUNNING"]


def test_output_that_cannot_be_encoded(tmp_path: Path) -> None:
    printed = on_a_terminal("print_table([Column('A')], [('é',)])\nprint_line('漢')", 80, PYTHONIOENCODING="ascii")
    assert "\\xe9" in printed and "\\u6f22" in printed
