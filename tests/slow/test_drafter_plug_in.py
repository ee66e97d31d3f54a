"""A second architecture, installed as a package: trained, measured losslessly, resumed; engines refuse it in words."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from drafter_trainer import drafter_interface
from drafter_trainer.checkpoint import load_drafter_weights
from drafter_trainer.cli import main
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.evaluation.static_drafter import StaticDrafter
from slipstream.run_spec.spec import TargetSpec
from tests.fakes.forked_server import forked_target_server
from tests.fakes.plug_in import NAME, installed, write_plug_in
from tests.fakes.tiny_run import write_tiny_run

SETTINGS = (
    *("drafter.architecture=last_feature", "drafter.num_layers=5", "drafter.options.width=48"),
    *("train.max_steps=6", "checkpoint.every_steps=3", "checkpoint.keep=9", "optimizer.ema_decay=0.9"),
)


@pytest.fixture(scope="module")
def plug_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = write_plug_in(tmp_path_factory.mktemp("site") / "packages")
    with installed(directory):
        yield directory


def train(recipe: Path, run: Path, *settings: str) -> int:
    """In this process, with a target server of its own."""
    target = TargetSpec(model=str(recipe.parent / "target"), dtype="float32")
    words = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    with forked_target_server(target, run.parent / f"{run.name}.sqlite") as address:
        return main(["run", str(recipe), "--target", address, "--run-dir", str(run), *words])


@pytest.fixture(scope="module")
def trained(plug_in: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run; its recipe and target lie beside it."""
    directory = tmp_path_factory.mktemp("plug-in")
    recipe = write_tiny_run(directory)
    assert train(recipe, directory / "run") == 0
    return directory / "run"


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def test_it_learns_and_its_checkpoint_says_what_it_is(trained: Path) -> None:
    losses = [json.loads(line)["loss"] for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 6 and losses[-1] < losses[0]
    text, weights = load_drafter_weights(checkpoint(trained, 6))
    values = json.loads(text)
    assert values["architecture"] == NAME and values["width"] == 48 and values["target_layer_ids"] == [1, 2]
    assert set(weights) == {"fc.weight", "slots", "up.weight", "down.weight", "norm.weight"}
    assert DrafterConfig.from_json(text).to_json() == text


def test_it_decodes_losslessly_over_growing_and_over_fixed_caches(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_interface, "_FIRST_ROOM", 32)  # less than is decoded
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("why?", "the river town")))
    flags = ["--prompts", str(prompts), "--dtype", "float32", "--device", "cpu"]
    for more in ([], ["--batch-sizes", "2", "--compare-untrained"]):
        report = tmp_path / "report.json"
        assert main(["eval", str(trained), *flags, "--max-new-tokens", "40", *more, "--output", str(report)]) == 0
        found: dict[str, Any] = json.loads(report.read_text())
        assert found["lossless"] and found["results"]["trained"]["all"]["rounds"] > 0


def test_decoding_says_what_training_says(trained: Path) -> None:
    text, weights = load_drafter_weights(checkpoint(trained, 6))
    config = DrafterConfig.from_json(text)
    drafter = config.build().eval()
    drafter.load_state_dict(weights)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20, 2 * config.hidden_size, generator=generator)
    table = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    static = StaticDrafter(drafter, table, table, 64)
    positions = torch.arange(20)
    with torch.no_grad():
        # As after a round whose drafts were rejected: two tokens behind the anchor are not those of the text.
        static.extend(features[None] + 1.0, positions[None])
        static.extend(features[None, :11], positions[None, :11])
        proposed = static.propose(torch.tensor([7]), torch.arange(11, 15)[None])
        expected = drafter.blocks(features[10:11], table[torch.tensor([[7, *[config.mask_token_id] * 3]])])
    torch.testing.assert_close(proposed, expected[:, 1:] @ table.t())


def test_it_is_resumed_bit_for_bit(trained: Path) -> None:
    resumed = trained.parent / "resumed"
    shutil.copytree(trained, resumed, symlinks=True)
    shutil.rmtree(checkpoint(resumed, 6))
    (resumed / "checkpoints" / "latest").unlink()
    (resumed / "checkpoints" / "latest").symlink_to("step-00000003")
    assert train(trained.parent / "tiny.toml", resumed) == 0
    for name in ("drafter", "optimizer"):
        ours, theirs = (
            safetensors.torch.load_file(checkpoint(run, 6) / f"{name}.safetensors") for run in (trained, resumed)
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())


def test_another_run_begins_with_it(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe, begins = trained.parent / "tiny.toml", (f"drafter.init_from={trained}", "train.max_steps=1")
    assert train(recipe, trained.parent / "second", "name=second", *begins) == 0
    assert train(recipe, trained.parent / "third", "name=third", *begins, "drafter.options.width=32") == 2
    assert "is another one than the run trains: width 48 (expected 32)" in capfd.readouterr().err


def test_it_is_not_exported(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(trained), "--to", "vllm", "--output", str(trained.parent / "exported")]) != 0
    said = capfd.readouterr().err
    assert "of the architecture 'last_feature'; vLLM, SGLang and z-lab's code serve 'dflash' alone" in said
    assert "Traceback" not in said and not (trained.parent / "exported").exists()
