"""The report of an evaluation on a terminal: one table where it fits, else one for each setting and source, turned.

In a pipe or a file the table is as wide as it needs to be: nothing is ever cut.
"""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drafter_trainer.evaluation.report import (
    answers_in_words,
    loop_in_words,
    losslessness_in_words,
    part_batches_in_words,
    positions_in_words,
    row_in_words,
    shown_sources,
    target_in_words,
    title_in_words,
)
from drafter_trainer.evaluation.setting import Setting

_NAMES = ("setting", "decoding", "source")
_MEASURES = ("prompts", "tokens", "accepted length", "tokens/s", "speed vs plain")
_UNLIMITED = 100_000
_GAP = 2


def report_console() -> Console:
    """stdout: as wide as a person's terminal, as wide as needed where none looks."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(file=sys.stdout, width=None if is_terminal else _UNLIMITED)


def print_report(report: dict[str, Any], console: Console) -> None:
    """The numbers of every setting, source and way of decoding, then the verdict on losslessness in words."""
    title = f"{title_in_words(report)}; accepted length counts the bonus token"
    console.print(Text(title, "italic"), soft_wrap=True)
    rows = _rows(report)
    if _width((_NAMES + _MEASURES, *rows)) <= console.width:
        console.print(_table(_NAMES + _MEASURES, _without_repeats(rows), num_names=len(_NAMES)))
    else:
        _print_turned(rows, console)
    verdict = (*losslessness_in_words(report), target_in_words(report["settings"]), *answers_in_words(report))
    for line in (*positions_in_words(report), *part_batches_in_words(report), *verdict, loop_in_words(report)):
        # The terminal breaks what is too long; a line in a file stays one.
        console.print(line, markup=False, soft_wrap=True)


def _rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Names and measures, in words; ways of decoding stand together."""
    return [
        (Setting(found["batch_size"], found["temperature"]).in_words(), label, source, *row_in_words(row))
        for found in report["by_setting"]
        for label, by_source in found["results"].items()
        for source, row in shown_sources(by_source).items()
    ]


def _without_repeats(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The setting only where it begins."""
    before = ("", *(row[0] for row in rows))
    return [("" if row[0] == last else row[0], *row[1:]) for row, last in zip(rows, before, strict=False)]


def _print_turned(rows: Sequence[tuple[str, ...]], console: Console) -> None:
    """A table for each setting and source: one column for each way of decoding, one row for each measure."""
    groups: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {}
    for setting, label, source, *measures in rows:
        groups.setdefault((setting, source), {})[label] = tuple(measures)
    for (setting, source), by_label in groups.items():
        console.print(f"\n{setting}, source {source}", markup=False, soft_wrap=True)
        lines = [(name, *values) for name, *values in zip(_MEASURES, *by_label.values(), strict=True)]
        console.print(_table(("", *by_label), lines, num_names=1))
    console.print()


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, num_names: int) -> Table:
    """Left what names a row, right its numbers; a cell that does not fit goes on in the next line."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index < num_names else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _width(rows: Sequence[Sequence[str]]) -> int:
    """Of the table, in characters."""
    columns = zip(*rows, strict=True)
    return sum(max(map(len, column)) + _GAP for column in columns)
