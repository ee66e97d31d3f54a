"""Rows of the benchmark that compares the held-out estimate with decoding."""

from pathlib import Path

import pytest

from benchmarks.heldout_estimate import FLOOR, main, parse, rows_of, settings_of, table


def test_the_ratio_is_below_one_whichever_is_larger() -> None:
    estimate = {"accepted_length": 1.5, "by_source": {"news": 1.2, "code": 2.0}}
    decoded = {name: {"accepted_length": length} for name, length in (("news", 1.5), ("code", 1.6), ("all", 1.5))}
    rows = rows_of(estimate, decoded)
    assert [(row.case, row.ratio) for row in rows] == [
        ("news", pytest.approx(0.8)),
        ("code", pytest.approx(0.8)),
        ("all", 1.0),
    ]
    assert {row.floor for row in rows} == {FLOOR}
    assert "news                1.2000    1.5000  0.8000" in table(rows)


def test_settings_of_a_short_run(tmp_path: Path) -> None:
    flags = ["--model", "m", "--data", str(tmp_path / "d"), "--prompts", str(tmp_path / "p"), "--steps", "4"]
    settings = settings_of(parse([*flags, "--set", "train.seed=1"]))
    assert "checkpoint.every_steps=1" in settings and settings[-1] == "train.seed=1"


def test_what_is_missing_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "m", "--data", str(tmp_path / "d"), "--prompts", str(tmp_path / "p"), "--device", "cpu"]
    assert main(flags) == 2
    assert "d does not exist" in capsys.readouterr().err
