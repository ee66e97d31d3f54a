"""A tiny model of each family through the whole path: served, trained for, decoded with, exported and imported."""

import json
from pathlib import Path

import pytest

from drafter_trainer.checkpoint import load_drafter_weights
from drafter_trainer.cli import main
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.formats import self_test
from drafter_trainer.formats.drafter_format import same_bits
from drafter_trainer.formats.published import read_published
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_facts import read_target_facts
from slipstream.target_loading import load_causal_lm
from tests.fakes.forked_server import forked_target_server
from tests.fakes.tiny_models import FAMILIES, Family, save_tiny_model
from tests.fakes.tiny_run import RECIPE, write_conversations
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer

STEPS = 6
TIED = ("qwen2", "gemma2", "gemma3")
FORMATS = ("vllm", "sglang", "zlab")


def command(*words: object) -> int:
    """`drafter-trainer …`, in this process."""
    return main([str(word) for word in words])


def write_run(directory: Path, family: Family) -> Path:
    """Target, conversations and recipe; returns the recipe."""
    tokenizer = build_tiny_tokenizer(directory / "target", "chatml", vocab_size=384)
    save_tiny_model(directory / "target", family, vocab_size=len(tokenizer) + 8, tied=family in TIED)
    write_conversations(directory / "conversations.jsonl", count=40)
    (directory / "prompts.jsonl").write_text('{"prompt": "why?"}\n{"prompt": "the river"}\n')
    recipe = directory / "tiny.toml"
    # The last layer's output lies before the final norm, where transformers' own list of states has it behind.
    text = RECIPE.replace("target_layer_ids = [1, 2]", "target_layer_ids = [1, 3]")
    recipe.write_text(text.replace("max_steps = 24", f"max_steps = {STEPS}"))
    return recipe


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_goes_the_whole_path(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "NUM_TOKENS", 8)
    recipe, run = write_run(tmp_path, family), tmp_path / "run"
    target = TargetSpec(model=str(tmp_path / "target"), dtype="float32")
    with forked_target_server(target, tmp_path / "ledger.sqlite") as address:
        assert command("run", recipe, "--target", address, "--run-dir", run) == 0
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == STEPS and losses[-1] < losses[0]

    checkpoint, report = (run / "checkpoints" / "latest").resolve(), tmp_path / "report.json"
    flags = ("--max-new-tokens", 16, "--dtype", "float32", "--device", "cpu", "--output", report)
    # It fails where an output is not plain decoding's, token for token.
    assert command("eval", checkpoint, "--prompts", tmp_path / "prompts.jsonl", *flags) == 0
    found = json.loads(report.read_text())
    assert found["lossless"] and found["settings"]["target_verified"]
    loaded = load_causal_lm(target, "cpu")
    facts = read_target_facts(loaded.model, loaded.tokenizer).config
    text, trained = load_drafter_weights(checkpoint)
    config = DrafterConfig.from_json(text)
    for name in FORMATS:
        # It decodes with the files before it is done, and refuses drafts that are not the drafter's.
        assert command("export", run, "--to", name, "--output", tmp_path / name, "--dtype", "float32") == 0
        published = read_published(tmp_path / name)
        assert published.format_name == name and published.config.for_target(facts) == config
        assert published.weights.keys() == trained.keys()
        assert all(same_bits(published.weights[key], weight) for key, weight in trained.items())
    # One format each, in turn: it decodes as the export does, with nothing but the files and the target.
    exported = tmp_path / FORMATS[FAMILIES.index(family) % len(FORMATS)]
    assert command("import", exported, "--target-model", tmp_path / "target") == 0
