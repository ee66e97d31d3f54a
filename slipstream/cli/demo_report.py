"""What the demo found, as summary.json and in words."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.run_spec.objective import CROSS_ENTROPY, ObjectiveName

LOSS_STEPS = 5
"""The summary's first and last loss are means over so many steps: one pack's loss is noisy."""


@dataclass(frozen=True)
class DemoResult:
    """What the processes of the demo left behind."""

    model: str
    device: str
    metrics: Path
    """metrics.jsonl of the run."""
    objective: Mapping[ObjectiveName, float]
    """What the loss is made of: names and weights."""
    evaluation: dict[str, Any]
    """eval.json."""
    dashboard: str
    """Where the run could be seen while the demo ran."""
    seconds: float
    """From the first process to the end of the last."""


def summarise(result: DemoResult) -> dict[str, Any]:
    """The content of summary.json; null stands where there is no number."""
    lines = result.metrics.read_text(encoding="utf-8").splitlines()
    records = [record for line in lines if "loss" in (record := json.loads(line))]
    # null where a loss was not finite and its step not applied
    losses = [float(record["loss"]) for record in records if record["loss"] is not None]
    results = result.evaluation["results"]
    return {
        "model": result.model,
        "device": result.device,
        "tokens": records[-1]["tokens"] if records else 0,
        "steps": records[-1]["step"] + 1 if records else 0,
        "seconds": round(result.seconds, 1),
        "objective": dict(result.objective),
        "loss": {"first": _mean(losses[:LOSS_STEPS]), "last": _mean(losses[-LOSS_STEPS:])},
        "accepted_length": {
            "before": _rounded(results["untrained"]["all"]["accepted_length"]),
            "after": _rounded(results["trained"]["all"]["accepted_length"]),
        },
        "lossless": result.evaluation["lossless"],
        "dashboard": result.dashboard,
    }


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write summary.json."""
    path.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def print_summary(summary: dict[str, Any], evaluation: dict[str, Any], path: Path) -> None:
    """The closing table and what it means, in words."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    loss, accepted = summary["loss"], summary["accepted_length"]
    # No title of the table: it would be wrapped to the table's width.
    console.print(f"A drafter for {summary['model']} on {summary['device']}")
    table = Table()
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    table.add_row(f"loss (mean of {LOSS_STEPS} steps)", _shown(loss["first"]), _shown(loss["last"]))
    table.add_row("accepted length, bonus included", _shown(accepted["before"]), _shown(accepted["after"]))
    table.add_row("tokens trained, padding included", "0", f"{summary['tokens']:,}")
    console.print(table)
    console.print(_loss_in_words(summary["objective"]))
    for line in _in_words(accepted["after"], evaluation["results"]["trained"]["all"]["speed_ratio_to_plain"]):
        console.print(line)
    console.print(f"{summary['seconds']:.0f} s from the first process to this table. Summary: {path}")


def _loss_in_words(objective: Mapping[str, float]) -> str:
    if set(objective) != {CROSS_ENTROPY}:
        return f"The loss is a weighted mean of {' and '.join(objective)} over the drafted tokens."
    return (
        "The loss is the cross-entropy of a drafted token in nats, a weighted mean over those that count. "
        "An even guess over a vocabulary has 10 to 12; a new drafter is sure and wrong, so it starts higher."
    )


def _in_words(accepted: float | None, ratio: float | None) -> list[str]:
    if accepted is None or ratio is None:
        return ["The answers were too short for a single verification round: nothing can be said about speed."]
    yields = f"Each verification pass of the target now yields {accepted:.2f} tokens; plain decoding yields 1."
    if ratio >= 1:
        return [yields, f"Decoding here ran at {ratio:.2f}x the speed of plain decoding."]
    return [
        yields,
        f"Decoding here ran at {ratio:.2f}x the speed of plain decoding: a processor that is busy with one token "
        "pays for every drafted one, and a drafter trained for minutes does not earn that back. Drafters pay "
        "where verifying a block costs as much as one token, as on a GPU, and after longer training.",
    ]


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
