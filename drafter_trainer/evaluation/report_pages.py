"""The report as Markdown and as one HTML page that needs nothing from elsewhere; both are made of the JSON alone."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from drafter_trainer.evaluation.report import (
    answers_in_words,
    as_json,
    losslessness_in_words,
    part_batches_in_words,
    row_in_words,
    shares_in_words,
    shown_sources,
    target_in_words,
    title_in_words,
    write_text,
)
from drafter_trainer.evaluation.samples import BONUS, DRAFT, FIRST
from drafter_trainer.evaluation.setting import PLAIN, Setting
from drafter_trainer.evaluation.svg_plots import bar_plot, line_plot
from slipstream.disk import disk_errors_in_words

_NAMES = ("setting", "decoding", "source")
COLUMNS = (*_NAMES, "prompts", "tokens", "accepted length", "tokens/s", "speed vs plain")
_POSITIONS = "Acceptance by position"
MEANING = {
    FIRST: "first token, from the prefill",
    DRAFT: "accepted draft",
    BONUS: "the target's own token, one a round",
}

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --draft: #16a34a44; --bonus: #f59e0b44; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1040px; margin: 2em auto; padding: 0 1em; }
.wide { overflow-x: auto; } blockquote { white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3em .6em; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left; }
svg { width: 100%; max-width: 640px; font: 12px system-ui, sans-serif; fill: currentColor; }
svg .grid { stroke: var(--line); } svg .interval { stroke: currentColor; stroke-width: 2; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); padding: .8em; }
.draft { background: var(--draft); } .bonus { background: var(--bonus); } .first { text-decoration: underline; }
"""


def write_pages(directory: Path, report: dict[str, Any]) -> None:
    """Write eval.json, eval.md and eval.html.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, a file cannot be written.
    """
    with disk_errors_in_words(directory, flag="--report"):
        directory.mkdir(exist_ok=True)
    write_text(directory / "eval.json", as_json(report))
    write_text(directory / "eval.md", to_markdown(report))
    write_text(directory / "eval.html", to_html(report))


def to_markdown(report: dict[str, Any]) -> str:
    """Settings, table, verdict and samples."""
    lines = [f"# {title_in_words(report)}", "", *(f"- {name}: {value}" for name, value in _facts(report).items()), ""]
    lines += _markdown_table(COLUMNS, _rows(report))
    lines += ["", f"Intervals: {report['intervals']}.", "", *(f"- {line.strip()}" for line in _verdict(report)), ""]
    lines += [f"## {_POSITIONS}", "", *_markdown_table(*_positions(report)), ""]
    for sample in report.get("samples", ()):
        lines += [f"## {sample['source']}: {sample['prompt']}", "", _in_words(sample), "", *_quoted(sample), ""]
    return "\n".join(lines)


def to_html(report: dict[str, Any]) -> str:
    """One page, without scripts and without anything to load."""
    title = escape(title_in_words(report))
    facts = "".join(f"<li>{escape(name)}: {escape(str(value))}</li>" for name, value in _facts(report).items())
    verdict = "".join(f"<p>{escape(line)}</p>" for line in _verdict(report))
    legend = ", ".join(f'<span class="{kind}">{words}</span>' for kind, words in MEANING.items())
    samples = "\n".join(_html_sample(sample) for sample in report.get("samples", ()))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1><ul>{facts}</ul>
{_html_table(COLUMNS, _rows(report))}
<p>Intervals: {escape(report["intervals"])}.</p>
{verdict}
{_plots(report)}
<h2>Samples</h2><p>{legend}</p>
{samples or "<p>None were kept.</p>"}
</body></html>
"""


def _facts(report: dict[str, Any]) -> dict[str, Any]:
    names = ("target", "device", "dtype", "loop", "max_new_tokens", "processes", "threads_per_process", "torch")
    return {name.replace("_", " "): report["settings"][name] for name in names if name in report["settings"]}


def _rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (_named(found), label, source, *row_in_words(row))
        for found in report["by_setting"]
        for label, by_source in found["results"].items()
        for source, row in shown_sources(by_source).items()
    ]


def _named(found: dict[str, Any]) -> str:
    return Setting(found["batch_size"], found["temperature"]).in_words()


def _verdict(report: dict[str, Any]) -> list[str]:
    return [
        *losslessness_in_words(report),
        *part_batches_in_words(report),
        target_in_words(report["settings"]),
        *answers_in_words(report),
    ]


def _positions(report: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles and rows: the share of rounds in which each draft was kept."""
    rows = [
        ((_named(found), label, source), row["acceptance_by_position"])
        for found in report["by_setting"]
        for label, by_source in found["results"].items()
        for source, row in shown_sources(by_source).items()
        if label != PLAIN
    ]
    most = max((len(shares) for _, shares in rows), default=0)
    filled = [(*names, *shares_in_words(shares), *["-"] * (most - len(shares))) for names, shares in rows]
    return (*_NAMES, *map(str, range(1, most + 1))), filled


def _in_words(sample: dict[str, Any]) -> str:
    drafted = sum(kind == DRAFT for kind, _ in sample["pieces"])
    return f"{sample['decoding']}, {sample['setting']}: {drafted} of {len(sample['pieces'])} tokens were drafted."


def _quoted(sample: dict[str, Any]) -> list[str]:
    """Indented, so that Markdown takes nothing in it for its own."""
    text = "".join(f"[{text}]" if kind == DRAFT else text for kind, text in sample["pieces"])
    return ["    " + line for line in text.splitlines()]


def _html_sample(sample: dict[str, Any]) -> str:
    answer = "".join(f'<span class="{escape(kind)}">{escape(text)}</span>' for kind, text in sample["pieces"])
    heading = f"<h3>{escape(sample['source'])}: {escape(sample['prompt'])}</h3>"
    question = f"<blockquote>{escape(sample['question'])}</blockquote>"
    return f"{heading}{question}<p>{escape(_in_words(sample))}</p><pre>{answer}</pre>"


def _plots(report: dict[str, Any]) -> str:
    drafted = [(found, label) for found in report["by_setting"] for label in found["results"] if label != PLAIN]
    first, best = report["by_setting"][0], drafted[-1][1] if drafted else PLAIN
    by_source = shown_sources(first["results"][best])
    positions = line_plot(
        {source: row["acceptance_by_position"] for source, row in by_source.items()}, "position in the block"
    )
    lengths = bar_plot(
        [
            (f"{label}, {source}", _number(row["accepted_length"]), row["accepted_length_interval"])
            for label, of_source in first["results"].items()
            if label != PLAIN
            for source, row in shown_sources(of_source).items()
        ],
        "accepted length",
    )
    speeds = bar_plot(
        [
            (f"{label}, {_named(found)}", _number(row["tokens_per_second"]), row["tokens_per_second_interval"])
            for found in report["by_setting"]
            for label, row in ((label, of_source["all"]) for label, of_source in found["results"].items())
        ],
        "tokens per second",
        ".0f",
    )
    ratios = bar_plot(
        [
            (f"{label}, {_named(found)}", _number(row["speed_ratio_to_plain"]), row["speed_ratio_to_plain_interval"])
            for found, label in drafted
            for row in (found["results"][label]["all"],)
        ],
        "speed against plain decoding",
    )
    headings = (
        (_POSITIONS, f"Share of rounds in which the draft there was kept; {best}, {_named(first)}."),
        ("Accepted length", f"Tokens per verification round, the bonus token included; {_named(first)}."),
        ("Tokens per second", "New tokens of all sources over the time of all rounds, prefill excluded."),
        ("Speed against plain decoding", "Tokens per second over those of plain decoding by the same loop; 1 is even."),
    )
    plots = (f"{positions}{_html_table(*_positions(report))}" if positions else "", lengths, speeds, ratios)
    return "\n".join(
        f"<h2>{heading}</h2><p>{escape(words)}</p>{plot}"
        for (heading, words), plot in zip(headings, plots, strict=True)
        if plot
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _html_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    names = len(_NAMES)
    under = ["---"] * names + ["---:"] * (len(titles) - names)
    return [markdown_row(titles), markdown_row(under), *map(markdown_row, rows)]


def markdown_row(cells: Sequence[str]) -> str:
    """A row of a table; a bar in a cell does not end it."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
