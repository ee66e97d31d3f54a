"""The page of all benchmarks is what the results render to, and says what is below its floor."""

from typing import Any

import pytest

from benchmarks.report import BELOW, GOAL_MET, MET, PAGE, page, read_results, screen, verdict
from benchmarks.results_file import RESULTS


def _row(ratio: float | None, floor: float | None = 1.0, goal: float | None = 2.0) -> dict[str, Any]:
    row = {"case": "a | b", "metric": "x ÷ y", "unit": "ms", "ours": 12_345.6, "baseline": 3.0, "baseline_name": "y"}
    return row | {"ratio": ratio, "floor": floor, "goal": goal, "spread": None}


def _result(*rows: dict[str, Any], **extra: Any) -> dict[str, Any]:
    hardware = {"gpus": [{"name": "a GPU"}] * 2, "cores": 4}
    facts = {"commit": "0123456789abcdef", "time": "2026-01-02T03:04:05+00:00", "versions": {"torch": "2.0"}}
    return {"rows": list(rows), "hardware": hardware, **facts, **extra}


def test_committed_page_is_what_the_results_render_to() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read_results(RESULTS)), (
        "run `make bench-report` and commit the page"
    )


@pytest.mark.parametrize(
    ("ratio", "floor", "goal", "said"),
    [
        *[(0.99, 1.0, 2.0, BELOW), (1.0, 1.0, 2.0, MET), (2.0, 1.0, 2.0, GOAL_MET), (9.0, 1.0, None, MET)],
        *[(0.5, None, None, ""), (None, 1.0, None, "")],
    ],
)
def test_verdicts(ratio: float | None, floor: float | None, goal: float | None, said: str) -> None:
    assert verdict(_row(ratio, floor, goal)) == said


def test_page_begins_with_what_is_below_and_names_what_is_missing() -> None:
    results = {"train_step_A": _result(_row(0.5), _row(1.5) | {"interval": (1.25, 1.75)}), "new": _result(_row(None))}
    text = page(results)
    assert "Of 2 rows with a floor 1 are met, 0 of them with their goal; 1 are below." in text
    assert text.index("| a \\| b: x ÷ y | 0.50 | 1 |") < text.index("## Training step")
    assert "| 12,346 ms | 3 ms (y) | 1.50 [1.25, 1.75] | 1 | 2 | met |" in text
    assert "2 x a GPU, 4 cores; torch 2.0; commit 0123456789ab, 2026-01-02." in text
    assert text.count("Not measured yet.") == 9
    assert "\n## new\n" in text
    assert screen(results).endswith("0 goal met, 1 met, 1 below floor\n")


def test_ablations_are_one_table() -> None:
    def variant(ingredient: str, tokens: list[int], at_once: int = 1) -> dict[str, Any]:
        evaluation = {"tokens": {"s": tokens}, "rounds": {"s": [10] * len(tokens)}}
        asked = {"ingredient": ingredient}
        return {"asked": asked, "steps": 1234, "tokens_per_second": 5e4, "at_once": at_once, "evaluation": evaluation}

    variants = {"base": variant("base", [20, 20]), "muon": variant("optimizer", [25, 25], at_once=3)}
    text = page({"ablations": _result(_row(1.0, None, None), variants=variants)})
    assert "| base | base | 1,234 | 50.0 k | 2.000 [2.00, 2.00] | 2.000 [2.00, 2.00] |  |" in text
    assert "| muon | optimizer | 1,234 | (3 at once) | 2.500 [2.50, 2.50] | 2.500 [2.50, 2.50] | **+0.500 [" in text
