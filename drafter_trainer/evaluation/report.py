"""The result of an evaluation as JSON and as a table for people."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from drafter_trainer.evaluation.compare import PLAIN, Comparison, Tally


def total(tallies: dict[str, Tally]) -> Tally:
    """All sources of one way of decoding together, every round with the same weight."""
    whole = Tally()
    for tally in tallies.values():
        whole.prompts += tally.prompts
        whole.tokens += tally.tokens
        whole.seconds += tally.seconds
        whole.emitted += tally.emitted
        counts = whole.accepted_at or [0] * len(tally.accepted_at)
        whole.accepted_at = [a + b for a, b in zip(counts, tally.accepted_at, strict=True)]
    return whole


def to_dict(comparison: Comparison, settings: dict[str, Any]) -> dict[str, Any]:
    """JSON-ready report; `accepted_length` counts the bonus token, `ratio` is speculative over plain tokens/s."""
    ways: dict[str, Any] = {}
    for label, by_source in comparison.tallies.items():
        rows = {**by_source, "all": total(by_source)}
        plain = {**comparison.tallies[PLAIN], "all": total(comparison.tallies[PLAIN])}
        ways[label] = {source: _row(tally, plain[source]) for source, tally in rows.items()}
    return {
        "settings": settings,
        "accepted_length_counts": "accepted drafts + 1 bonus token, per verification round",
        "results": ways,
        "lossless": comparison.lossless,
        "differences": {label: [d.to_dict() for d in found] for label, found in comparison.differences.items()},
    }


def _row(tally: Tally, plain: Tally) -> dict[str, Any]:
    return {
        "prompts": tally.prompts,
        "tokens": tally.tokens,
        "rounds": tally.rounds,
        "accepted_length": tally.accepted_length,
        "acceptance_by_position": tally.acceptance_by_position,
        "tokens_per_second": tally.tokens_per_second,
        "speed_ratio_to_plain": tally.tokens_per_second / plain.tokens_per_second,
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write the report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def print_report(report: dict[str, Any], console: Console) -> None:
    """One line per source and way of decoding, then the verdict on losslessness in words."""
    table = Table(title="Speculative decoding, greedy; accepted length counts the bonus token", title_justify="left")
    for column in ("decoding", "source"):
        table.add_column(column)
    for column in ("prompts", "tokens", "accepted length", "tokens/s", "speed vs plain"):
        table.add_column(column, justify="right")
    for label, by_source in report["results"].items():
        shown = by_source if len(by_source) > 2 else {"all": by_source["all"]}
        for source, row in shown.items():
            table.add_row(
                label,
                source,
                str(row["prompts"]),
                str(row["tokens"]),
                f"{row['accepted_length']:.3f}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['speed_ratio_to_plain']:.2f}x",
            )
    console.print(table)
    for line in losslessness_in_words(report):
        console.print(line)


def losslessness_in_words(report: dict[str, Any]) -> list[str]:
    """What the comparison with plain decoding found."""
    settings, found = report["settings"], [d for ds in report["differences"].values() for d in ds]
    if not found:
        return ["Lossless: every output equals plain greedy decoding token for token."]
    errors = [d for d in found if not d["allowed"]]
    lines = [
        f"{len(found)} outputs differ from plain decoding ({settings['dtype']}); allowed where the target's two "
        f"largest logits are at most {settings['gap_bound']} apart: {len(found) - len(errors)}, "
        f"not allowed: {len(errors)}."
    ]
    lines += [
        f"  {d['prompt']} at token {d['position']}: plain {d['plain_token']}, speculative {d['speculative_token']}, "
        f"top-two gap {d['top_two_gap']:.4f}{'' if d['allowed'] else '  ← error'}"
        for d in found[:20]
    ]
    return lines
