"""A run whose checkpoint was written in an older format goes on, bit for bit; one of a newer format is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drafter_trainer.checkpoint_state import FORMAT_VERSION, file_checksum, newest_checkpoint, read_state
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from tests.fakes.live_run import LiveRun, live_target
from tests.fakes.tiny_run import write_tiny_run
from tests.fakes.training import assert_same_run

SETTINGS = ("train.max_steps=9", "checkpoint.every_steps=5", "checkpoint.keep=1")
NEW_IN_RECIPES = (("drafter", "architecture"), ("drafter", "options"), ("eval", "heldout"), ("eval", "every_steps"))
"""Since version 1."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def address(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with live_target(recipe, tmp_path_factory.mktemp("ledger")) as server:
        yield server.address


def rewrite(directory: Path, version: int, state: dict[str, Any], drafter_config: dict[str, Any]) -> None:
    """Its texts, and a manifest that agrees with them."""
    (directory / "state.json").write_text(json.dumps(state | {"format_version": version}))
    (directory / "drafter_config.json").write_text(json.dumps(drafter_config))
    manifest = json.loads((directory / "manifest.json").read_text()) | {"format_version": version}
    for name in ("state.json", "drafter_config.json"):
        size, checksum = file_checksum(directory / name)
        manifest["files"][name] = {"size": size, "crc32c": checksum}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def texts(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    state, config = ((directory / name).read_text() for name in ("state.json", "drafter_config.json"))
    return json.loads(state), json.loads(config)


def test_a_run_goes_on_from_a_checkpoint_of_version_1(recipe: Path, address: str, tmp_path: Path) -> None:
    undisturbed = LiveRun(recipe, address, tmp_path / "undisturbed", *SETTINGS, "name=undisturbed")
    undisturbed.train()
    run = LiveRun(recipe, address, tmp_path / "older", *SETTINGS, "name=older")
    run.train_until(5)
    checkpoint = newest_checkpoint(run.directory / "checkpoints")
    assert checkpoint is not None
    state, config = texts(checkpoint)
    del state["heldout"], config["architecture"]
    for table, key in NEW_IN_RECIPES:
        del state["spec"][table][key]
    rewrite(checkpoint, 1, state, config)
    assert read_state(checkpoint).format_version == 1
    run.train()
    assert_same_run(run, undisturbed)
    assert [record["step"] for record in run.records()] == list(range(9))
    newest = newest_checkpoint(run.directory / "checkpoints")
    assert newest is not None and read_state(newest).format_version == FORMAT_VERSION


def test_a_run_does_not_go_on_from_a_newer_one(recipe: Path, address: str, tmp_path: Path) -> None:
    run = LiveRun(recipe, address, tmp_path, *SETTINGS, "name=newer")
    run.train_until(5)
    checkpoint = newest_checkpoint(run.directory / "checkpoints")
    assert checkpoint is not None
    state, config = texts(checkpoint)
    rewrite(checkpoint, FORMAT_VERSION + 1, state | {"momentum_of_the_moon": 1}, config)
    before = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}
    with pytest.raises(SlipstreamError, match="was written by a newer Slipstream: its format version is") as refused:
        run.train()
    assert refused.value.reason is Reason.CHECKPOINT_INVALID and "Update Slipstream" in refused.value.remedy
    assert {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()} == before
