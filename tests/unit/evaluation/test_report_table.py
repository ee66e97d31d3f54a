"""The table of an evaluation: whole in every terminal, and in a pipe."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from drafter_trainer.evaluation.report_table import print_report, report_console

ROW = {
    "prompts": 80,
    "tokens": 12345,
    "accepted_length": 3.1234,
    "accepted_length_interval": (2.95, 3.31),
    "tokens_per_second": 123.45,
    "speed_ratio_to_plain": 2.1,
    "speed_ratio_to_plain_interval": (2.0, 2.2),
    "acceptance_by_position": [0.5, 0.25],
}
PLAIN_ROW = ROW | {"acceptance_by_position": []}
NUMBERS = ["80", "12345", "3.123", "[2.95, 3.31]", "123.5", "2.10x", "[2.00, 2.20]"]


def report(*sources: str, temperatures: tuple[float, ...] = (0.0,)) -> dict[str, object]:
    plain, drafted = (dict.fromkeys((*sources, "all"), row) for row in (PLAIN_ROW, ROW))
    results = {"plain": plain, "untrained": drafted, "trained": drafted}
    settings = {"run": "demo", "checkpoint": "step-00000640", "target_verified": True, "dtype": "float32"}
    settings |= {"loop": "caches that grow", "gap_bound": 0.0}
    return {
        "settings": settings,
        "intervals": "95%, bootstrap over prompts, 1000 resamples, seed 0",
        "by_setting": [
            {"batch_size": 1, "temperature": warmth, "results": results, "differences": {}} for warmth in temperatures
        ],
    }


def printed(of: dict[str, object], width: int) -> str:
    out = io.StringIO()
    print_report(of, Console(file=out, width=width))
    return out.getvalue()


def test_one_table_where_it_fits() -> None:
    text = printed(report("math", "code", temperatures=(0.0, 1.0)), 120)
    title, header, *rows = text.splitlines()[:20]
    assert title == "Speculative decoding: demo, step-00000640; accepted length counts the bonus token"
    assert re.split(r" {2,}", header.strip()) == [
        *("setting", "decoding", "source", "prompts", "tokens", "accepted length", "tokens/s", "speed vs plain"),
    ]
    assert rows[0].split("  ")[0] == "batch 1, greedy" and " plain " in rows[0] and " math " in rows[0]
    assert rows[3].startswith("   ") and rows[3].split()[:2] == ["untrained", "math"], "what is repeated is left out"
    assert rows[9].startswith("batch 1, temperature 1")
    assert all(number in rows[0] for number in NUMBERS)
    assert "Acceptance by position, trained, batch 1, greedy: 50% 25%" in text
    assert "position, plain" not in text


def test_a_narrow_terminal_gets_the_table_turned_and_whole() -> None:
    text = printed(report("math", "code", temperatures=(0.0, 1.0)), 80)
    tables = text.split("\n\n")
    assert len(tables) == 1 + 2 * 3 + 1, "one for each setting and source"
    title, header, *rows = tables[1].splitlines()
    assert title == "batch 1, greedy, source math" and header.split() == ["plain", "untrained", "trained"]
    assert [row.split("  ")[0] for row in rows] == [
        "prompts",
        "tokens",
        "accepted length",
        "tokens/s",
        "speed vs plain",
    ]
    assert rows[2].count("3.123 [2.95, 3.31]") == 3
    assert max(map(len, [line for table in tables[1:-1] for line in table.splitlines()])) <= 80


def test_nothing_is_cut_however_narrow() -> None:
    text = printed(report("math"), 40)
    assert "…" not in text
    assert all(text.count(part) >= 3 for part in ("12345", "3.123", "3.31]", "2.10x"))


def test_in_a_pipe_every_row_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    print_report(report("a" * 200, "code"), report_console())
    lines = capsys.readouterr().out.splitlines()
    assert sum(all(number in line for number in NUMBERS) for line in lines) == 9
    assert lines[-1] == (
        "Decoded in float32 over caches that grow, intervals: 95%, bootstrap over prompts, 1000 resamples, seed 0."
    )


@pytest.mark.parametrize(
    ("length", "unproven", "words"),
    [
        (1.05, None, ""),
        (1.05, {"file": "talks.jsonl", "written_by": None}, "nothing shows who wrote talks.jsonl"),
        (1.8, {"file": "talks.jsonl", "written_by": None}, ""),
        (1.8, {"file": "talks.jsonl", "written_by": "owner/other"}, "owner/other wrote talks.jsonl, not the target"),
    ],
)
def test_answers_that_are_not_the_targets_are_said_with_the_remedy(
    length: float, unproven: dict[str, object] | None, words: str
) -> None:
    shown: dict[str, Any] = report("math")
    shown["settings"]["unproven_answers"] = unproven
    shown["by_setting"][0]["results"]["trained"] = {"all": ROW | {"accepted_length": length}}
    text = printed(shown, 300)
    assert words in text and ("slipstream data regenerate RECIPE --to FILE" in text) == bool(words)
    assert [line for line in text.splitlines() if words and words in line][1:] == []
