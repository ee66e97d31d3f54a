"""From finished variants of benchmarks/ablations.py to its rows and its table."""

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.ablation_variants import BASE, BASE_SEEDS, FP8_SEEDS
from benchmarks.accepted_length import ALL, Measured, difference_interval, interval, ratio_interval
from benchmarks.results_file import Row


def make_rows(variants: Mapping[str, dict[str, Any]]) -> list[Row]:
    """Accepted length over all prompts and speed of every variant, beside those of the base."""
    base = Measured.of(variants[BASE]["evaluation"])
    base_length, base_speed = base.accepted_length(ALL), variants[BASE]["tokens_per_second"]
    rows = []
    for name, found in variants.items():
        one = Measured.of(found["evaluation"])
        length = one.accepted_length(ALL)
        rows.append(
            Row(
                name,
                "accepted length, bonus included, all prompts, variant ÷ base",
                "tokens",
                length,
                base_length,
                BASE,
                length / base_length,
                interval=ratio_interval(one, base, ALL),
            )
        )
        if found["at_once"] == 1:
            speed = found["tokens_per_second"]
            metric = "trained tokens/s, padding included, variant ÷ base"
            rows.append(Row(name, metric, "tokens/s", speed, base_speed, BASE, speed / base_speed))
    return [*rows, *_fp8_row(variants)]


def _fp8_row(variants: Mapping[str, dict[str, Any]]) -> list[Row]:
    """Whether FP8 costs accepted length: its mean over seeds may lie below bfloat16's by twice their deviation."""
    if not {*BASE_SEEDS, *FP8_SEEDS} <= variants.keys():
        return []
    in_bfloat16, in_fp8 = (
        [Measured.of(variants[name]["evaluation"]).accepted_length(ALL) for name in seeds]
        for seeds in (BASE_SEEDS, FP8_SEEDS)
    )
    allowed = 2 * statistics.stdev(in_bfloat16)
    missing = statistics.mean(in_bfloat16) - statistics.mean(in_fp8)
    return [
        Row(
            f"fp8, {len(FP8_SEEDS)} seeds",
            "accepted length, twice the standard deviation of bfloat16's seeds ÷ what FP8's mean is below theirs",
            "tokens",
            missing,
            allowed,
            "twice the standard deviation",
            # At most 100: what is not below at all has no ratio.
            min(allowed / missing, 100.0) if missing > 0 else 100.0,
            floor=1.0,
        )
    ]


def markdown(variants: Mapping[str, dict[str, Any]]) -> str:
    """One line a variant: steps, speed, accepted length by source, difference from the base with a paired interval."""
    if BASE not in variants:
        return "The base is not measured yet, so that nothing can be compared.\n"
    base = Measured.of(variants[BASE]["evaluation"])
    sources = base.sources
    head = ["", "varied", "steps", "tokens/s", *sources, "difference, all prompts"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * 2}{'--:|' * (len(head) - 2)}"]
    for name, found in variants.items():
        one = Measured.of(found["evaluation"])
        speed = (
            f"{found['tokens_per_second'] / 1e3:.1f} k" if found["at_once"] == 1 else f"({found['at_once']} at once)"
        )
        lengths = []
        for source in sources:
            low, high = interval(one, source)
            lengths.append(f"{one.accepted_length(source):.3f} [{low:.2f}, {high:.2f}]")
        cells = [
            name,
            found["asked"]["ingredient"],
            f"{found['steps']:,}",
            speed,
            *lengths,
            _difference(name, one, base),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _difference(name: str, one: Measured, base: Measured) -> str:
    """Bold where the interval does not hold 0."""
    if name == BASE:
        return ""
    low, high = difference_interval(one, base, ALL)
    text = f"{one.accepted_length(ALL) - base.accepted_length(ALL):+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"**{text}**" if low > 0 or high < 0 else text
