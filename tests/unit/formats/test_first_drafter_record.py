"""A start after a kill begins with the drafter that the first start has begun with, whatever its name means by then."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from drafter_trainer.first_drafter_record import RECORD, FirstDrafter
from drafter_trainer.run_directory import RunDirectory
from slipstream.errors import SlipstreamError
from tests.fakes.hub_cache import COMMIT, put_drafter_into_cache
from tests.unit.formats.conftest import Source


@pytest.fixture
def run(source: Source, tmp_path: Path) -> RunDirectory:
    """A new run, beside one with a checkpoint."""
    shutil.copytree(source.run, tmp_path / "earlier", symlinks=True)
    return RunDirectory(tmp_path / "new")


def begin(run: RunDirectory, named: str) -> Path:
    """What a trainer finds, and records once it has begun."""
    first = FirstDrafter(run, named)
    found = first.find()
    (run.root / RECORD).write_text(first.to_json())
    return found


def add_checkpoint(run_directory: Path) -> Path:
    """A newer one, with the same in it."""
    checkpoints = run_directory / "checkpoints"
    before = checkpoints / (checkpoints / "latest").readlink()
    newer = shutil.copytree(before, checkpoints / "step-00009999")
    (checkpoints / "latest").unlink()
    (checkpoints / "latest").symlink_to(newer.name)
    return newer


@pytest.mark.parametrize("named", ["earlier", "earlier@latest", "PATH"])
def test_the_newest_checkpoint_of_the_first_start_stays(
    named: str, run: RunDirectory, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = run.root.parent / "earlier"
    named = str(earlier) if named == "PATH" else named
    found = begin(run, named)
    assert found == earlier / "checkpoints" / source.checkpoint.name
    record = json.loads((run.root / RECORD).read_text())
    assert (record["named"], record["directory"], record["run"]) == (named, str(found), "tiny")
    assert record["crc32c"].keys() == {file.name for file in found.glob("*.safetensors")} != set()
    newer = add_checkpoint(earlier)
    assert begin(run, named) == found
    assert FirstDrafter(run, f"earlier@{newer.name}").find() == newer, "another name asks for another one"
    shutil.rmtree(found)
    with caplog.at_level(logging.WARNING):
        assert begin(run, named) == newer
    assert "first_drafter_is_gone" in caplog.text


def test_one_that_was_replaced_in_its_place_is_said(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    found = begin(run, "earlier")
    assert begin(run, "earlier") == found and "first_drafter_has_changed" not in caplog.text
    weights = next(found.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes() + b" ")
    assert begin(run, "earlier") == found and "first_drafter_has_changed" in caplog.text


def test_what_is_pruned_while_a_trainer_compiles_is_looked_for_again(run: RunDirectory) -> None:
    first = FirstDrafter(run, "earlier")
    found = first.find()
    newer = add_checkpoint(run.root.parent / "earlier")
    assert first.find() == found
    shutil.rmtree(found)
    assert first.find() == newer


def test_a_drafter_of_a_hub_is_known_by_its_commit(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    snapshot = put_drafter_into_cache(cache, "some/drafter")
    assert begin(run, "some/drafter") == snapshot
    record = json.loads((run.root / RECORD).read_text())
    assert record == {
        "named": "some/drafter",
        "directory": str(snapshot),
        "commit": COMMIT,
        "crc32c": {"model.safetensors": 0},
    }
    newer = put_drafter_into_cache(cache, "some/drafter", commit="f" * 40)
    assert begin(run, "some/drafter") == snapshot, "although the branch has moved on"
    assert FirstDrafter(RunDirectory(tmp_path / "another"), "some/drafter").find() == newer


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"named": 1}'])
def test_a_record_that_cannot_be_read_is_none(damage: str, run: RunDirectory) -> None:
    (run.root / RECORD).write_text(damage)
    assert FirstDrafter(run, "earlier").find().is_dir()


def test_a_run_cannot_begin_with_itself(run: RunDirectory) -> None:
    with pytest.raises(SlipstreamError, match="drafter.init_from is new, which is a run that has no checkpoint yet"):
        FirstDrafter(run, "new").find()
