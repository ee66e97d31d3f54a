"""What commands print: tables that fit, times and numbers for people, JSON for programs."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

ABSENT = "-"
STATE_STYLES = {
    "PENDING": "yellow",
    "STARTING": "cyan",
    "RUNNING": "green",
    "PAUSING": "yellow",
    "PAUSED": "yellow",
    "STOPPING": "yellow",
    "STOPPED": "magenta",
    "FAILED": "red",
    "SUCCEEDED": "bold green",
    "FREE": "green",
    "BUSY": "cyan",
    "LEAVING": "yellow",
    "LOST": "red",
    "REACHABLE": "green",
    "LOADING": "yellow",
    "DRAINING": "yellow",
    "UNREACHABLE": "red",
    "INCOMPATIBLE": "red",
}
_UNLIMITED = 100_000
_GAP = 2
# Text of others may hold what steers a terminal.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    is_number: bool = False
    rank: int = 0
    """A terminal that is too narrow loses the columns of the highest rank first, and never those of rank 0."""
    may_wrap: bool = False
    """Within the column, where even those of rank 0 do not fit."""


def make_console() -> "Console":
    """stdout: coloured on a terminal where NO_COLOR is not set, as wide as it needs to be elsewhere."""
    from rich.console import Console

    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    width = None if is_terminal() else _UNLIMITED
    return Console(width=width, highlight=False, markup=False, emoji=False)


def is_terminal() -> bool:
    """Whether a person reads stdout."""
    return sys.stdout is not None and sys.stdout.isatty()


def print_json(value: Any) -> None:
    """One document, for programs; strict JSON."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_json_line(value: Any) -> None:
    """One object of a stream, at once."""
    print(json.dumps(value, allow_nan=False, separators=(",", ":")), flush=True)


def print_line(text: str) -> None:
    """One line of a stream, at once, with nothing in it that a terminal would obey."""
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    print(printable(text), flush=True)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Rows under their titles; values that name a state are coloured, on a terminal."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    console = make_console()
    rows = [[printable(value).replace("\n", " ") for value in row] for row in rows]
    needed = [
        max(cell_len(column.title), *(cell_len(row[index]) for row in rows)) for index, column in enumerate(columns)
    ]
    shown = _that_fit(columns, needed, console.width)
    least = [cell_len(columns[index].title) if columns[index].may_wrap else needed[index] for index in shown]
    # What must be shown and does not fit is broken by the terminal: a table would leave out letters, or whole columns.
    console.width = max(console.width, sum(least) + _GAP * len(least))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for index in shown:
        column = columns[index]
        table.add_column(
            column.title,
            justify="right" if column.is_number else "left",
            no_wrap=not column.may_wrap,
            min_width=None if column.may_wrap else needed[index],
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(row[index], STATE_STYLES.get(row[index], "")) for index in shown))
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _that_fit(columns: Sequence[Column], needed: Sequence[int], width: int) -> list[int]:
    """Indices of the columns that are shown."""
    shown = list(range(len(columns)))
    while sum(needed[index] + _GAP for index in shown) - _GAP > width:
        worst = max(shown, key=lambda index: columns[index].rank)
        if columns[worst].rank == 0:
            break
        shown.remove(worst)
    return shown


def print_fields(fields: Mapping[str, str]) -> None:
    """Names and values, one a line; empty values are left out."""
    from rich.text import Text

    console = make_console()
    width = max(map(len, fields))
    for name, value in fields.items():
        if value:
            text = Text()
            text.append(f"{name:<{width}}  ", "dim")
            text.append(printable(value).replace("\n", "\n" + " " * (width + 2)), STATE_STYLES.get(value, "none"))
            console.print(text, soft_wrap=True)


def printable(text: str) -> str:
    """The text with control characters spelt out."""
    return text.translate(_CONTROLS)


def duration(seconds: float | None) -> str:
    """`45s`, `3m 12s`, `2h 5m`, `3d 4h`."""
    if seconds is None:
        return ABSENT
    whole = max(0, round(seconds))
    for size, unit, lesser, lesser_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // lesser}{lesser_unit}"
    return f"{whole}s"


def local_time(moment: str | None) -> str:
    """An ISO 8601 time of the API, in local time."""
    if not moment:
        return ABSENT
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def clock_time(moment: str) -> str:
    """The same without the date."""
    return datetime.fromisoformat(moment).astimezone().strftime("%H:%M:%S")


def age(moment: str | None) -> str:
    """How long ago, by this machine's clock."""
    return duration(time.time() - datetime.fromisoformat(moment).timestamp()) if moment else ABSENT


def measure(value: Any, digits: int = 3) -> str:
    """A number of somebody's report; `-` where there is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:,.{digits}f}" if is_number else ABSENT


def percent(fraction: float | None) -> str:
    """`10.5%`."""
    return f"{100 * fraction:.1f}%" if fraction is not None else ABSENT
