"""The decoding benchmark as a whole, on a CPU and a tiny target: what it measures, and that it keeps to its time."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import decode_speed
from tests.fakes.tiny_run import write_tiny_run


def test_costs_of_rounds_are_measured_until_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_tiny_run(tmp_path / "run")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "p", "source": "s", "prompt": "why?"}) + "\n")
    monkeypatch.setattr(decode_speed, "REPETITIONS", 1)
    monkeypatch.setattr(decode_speed, "ROUNDS", 2)
    monkeypatch.setattr(decode_speed, "SHAPES", ((1, 4), (2, 4)))
    model = recipe.parent / "target"
    flags = ["--model", model, "--recipe", recipe, "--prompts", prompts, "--dtype", "float32", "--no-graphs"]
    monkeypatch.setattr(sys, "argv", ["decode_speed", *map(str, flags), "--out", str(tmp_path)])
    assert decode_speed.main() == 0
    report = json.loads((tmp_path / "decode_speed.json").read_text())
    ours = {(row["case"], row["metric"]): row["ours"] for row in report["rows"]}
    whole = "a round, host read included"
    case = "2 draft layers, block 4"
    assert ours[case, "break-even accepted length, bonus included"] == pytest.approx(
        ours[case, whole] / ours["plain", whole]
    )
    assert report["left_out"] == []

    monkeypatch.setattr(sys, "argv", [*sys.argv, "--leave-by", "0"])
    assert decode_speed.main() == 0
    report = json.loads((tmp_path / "decode_speed.json").read_text())
    assert {row["case"] for row in report["rows"]} == {"plain"}
    assert report["left_out"] == ["what follows plain: out of time"]
    assert "decode_speed.json" in capsys.readouterr().out
