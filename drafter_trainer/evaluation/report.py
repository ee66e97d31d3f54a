"""The result of an evaluation as JSON and as a table for people."""

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from drafter_trainer.evaluation.compare import PLAIN, Comparison, Tally
from drafter_trainer.evaluation.losslessness import Difference
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


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
    """JSON-ready report; None stands where there is no number: no verification round, an output that ended."""
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
        "differences": {label: [_difference(d) for d in found] for label, found in comparison.differences.items()},
    }


def _row(tally: Tally, plain: Tally) -> dict[str, Any]:
    return {
        "prompts": tally.prompts,
        "tokens": tally.tokens,
        "rounds": tally.rounds,
        "accepted_length": _finite(tally.accepted_length),
        "acceptance_by_position": tally.acceptance_by_position,
        "tokens_per_second": _finite(tally.tokens_per_second),
        # Without a token behind the prefill's there is no speed to compare with.
        "speed_ratio_to_plain": _finite(tally.tokens_per_second / plain.tokens_per_second) if plain.tokens else None,
    }


def _difference(difference: Difference) -> dict[str, Any]:
    return difference.to_dict() | {"top_two_gap": _finite(difference.top_two_gap)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write the report as JSON.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, the file cannot be written.
    """
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SlipstreamError(
            f"the report cannot be written to {path}: {error.strerror}",
            reason=Reason.PATH_NOT_ALLOWED,
            remedy="Give --output a file in a directory that you may write to.",
        ) from error


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
                _shown(row["accepted_length"], ".3f"),
                _shown(row["tokens_per_second"], ".1f"),
                _shown(row["speed_ratio_to_plain"], ".2f", "x"),
            )
    console.print(table)
    for line in (*losslessness_in_words(report), target_in_words(report["settings"])):
        console.print(line)


def target_in_words(settings: dict[str, Any]) -> str:
    """Whether these are numbers of the drafter with its own target."""
    if settings["target_verified"]:
        return "Target verified: its files are those that the drafter was trained with."
    return f"Target not verified: {settings['target']} is another one than the drafter was trained for, as allowed."


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


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
        f"top-two gap {_shown(d['top_two_gap'], '.4f')}{'' if d['allowed'] else '  ← error'}"
        for d in found[:20]
    ]
    return lines
