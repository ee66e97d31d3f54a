"""An FP8 checkpoint through the whole path: planned, inspected, served, trained for, decoded with losslessly."""

import json
from pathlib import Path
from typing import Any

import pytest

from drafter_trainer.cli import main as drafter_trainer
from slipstream.cli.main import run_command as slipstream
from slipstream.run_spec.spec import TargetSpec
from target_server.cli import run_command as target_server
from tests.fakes.forked_server import forked_target_server
from tests.fakes.quantised_models import quantise_to_fp8
from tests.fakes.tiny_models import save_tiny_model
from tests.fakes.tiny_run import RECIPE, write_conversations
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer

STEPS = 3


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tokenizer = build_tiny_tokenizer(tmp_path / "target", "chatml", vocab_size=384)
    save_tiny_model(tmp_path / "target", "qwen3", vocab_size=len(tokenizer) + 8, hidden_size=128)
    quantise_to_fp8(tmp_path / "target")
    write_conversations(tmp_path / "conversations.jsonl", count=20)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "why?"}\n')
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(RECIPE.replace("max_steps = 24", f"max_steps = {STEPS}"))
    return recipe


def test_an_fp8_target_goes_the_whole_path(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate", reason="FP8 checkpoints need the package accelerate")
    place, run = recipe.parent, recipe.parent / "run"

    def planned(*flags: str) -> dict[str, Any]:
        capsys.readouterr()
        assert slipstream(["plan", str(recipe), "-o", "json", *flags]) == 0
        memory: dict[str, Any] = json.loads(capsys.readouterr().out)["memory"]
        return memory

    config = json.loads((place / "target" / "config.json").read_text())
    del config["quantization_config"]
    (place / "config.json").write_text(json.dumps(config))
    # It is the trainer's memory, whose copies of embedding and head are not quantised.
    assert planned("--memory", "8GiB") == planned("--memory", "8GiB", "--target-config", str(place / "config.json"))
    assert target_server(["inspect", str(recipe), "--report", str(place / "inspection.json")]) == 0
    flags = ["--max-new-tokens", "4", "--device", "cpu", "--report", str(place / "answers.json")]
    assert target_server(["regenerate", str(recipe), "--to", str(place / "answers.jsonl"), *flags]) == 0

    target = TargetSpec(model=str(place / "target"), dtype="float32")
    with forked_target_server(target, place / "ledger.sqlite") as address:
        assert drafter_trainer(["run", str(recipe), "--target", address, "--run-dir", str(run)]) == 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == STEPS

    report = place / "report.json"
    flags = ["--max-new-tokens", "12", "--dtype", "float32", "--device", "cpu", "--output", str(report)]
    checkpoint = str((run / "checkpoints" / "latest").resolve())
    # It fails where an output is not plain decoding's, token for token.
    assert drafter_trainer(["eval", checkpoint, "--prompts", str(place / "prompts.jsonl"), *flags]) == 0
    found = json.loads(report.read_text())
    assert found["lossless"] and found["settings"]["target_verified"]
