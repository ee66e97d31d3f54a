"""Checkpoints: complete or absent, verified, pruned, owned."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from drafter_trainer.checkpoint import Checkpoint, load_checkpoint, load_drafter_weights, save_checkpoint
from drafter_trainer.checkpoint_state import (
    FORMAT_VERSION,
    CheckpointState,
    Cursor,
    LoopState,
    file_checksum,
    newest_checkpoint,
    read_state,
)
from drafter_trainer.run_directory import RunDirectory
from drafter_trainer.safetensors_file import write_safetensors
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


def make_checkpoint(next_step: int, *, incarnation: int = 1, elements: int = 1000) -> Checkpoint:
    generator = torch.Generator().manual_seed(next_step)
    return Checkpoint(
        state=CheckpointState(
            run="tiny",
            incarnation=incarnation,
            cursor=Cursor(next_step=next_step, first_sequence_number=3, quarantined=(7,)),
            loop=LoopState(tokens=next_step * 128, not_finite_steps=1),
            total_steps=100,
            target_fingerprint="f",
            stream="streams/s",
            spec={"name": "tiny"},
            versions={"torch": "2"},
        ),
        drafter_config='{"block_size": 4}\n',
        drafter={"fc.weight": torch.randn(elements, generator=generator).view(-1, 10), "norm.weight": torch.ones(3)},
        optimizer={"exp_avg.fc.weight": torch.randn(elements, generator=generator), "step": torch.tensor(4.0)},
        rng={"cpu": torch.get_rng_state()},
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.claim(1, "trainers/a")
    return directory


def test_what_was_saved_is_loaded(run: RunDirectory) -> None:
    saved = make_checkpoint(42)
    directory = save_checkpoint(run, saved, keep=3)

    assert directory.name == "step-00000042"
    assert newest_checkpoint(run.checkpoints) == directory
    loaded = load_checkpoint(directory)
    assert loaded.state == saved.state
    for kind in ("drafter", "optimizer", "rng"):
        old, new = getattr(saved, kind), getattr(loaded, kind)
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) for name in old)
    config, weights = load_drafter_weights(directory)
    assert config == saved.drafter_config
    assert torch.equal(weights["fc.weight"], saved.drafter["fc.weight"])


def test_files_are_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.arange(12.0).view(3, 4).t(),
        "reduced": torch.ones(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "bytes": torch.arange(7, dtype=torch.uint8),
    }
    size, checksum = write_safetensors(tmp_path / "t.safetensors", tensors)
    assert file_checksum(tmp_path / "t.safetensors") == (size, checksum)
    loaded = safetensors.torch.load_file(tmp_path / "t.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_the_newest_are_kept_and_latest_is_among_them(run: RunDirectory) -> None:
    for step in (10, 20, 30, 40):
        save_checkpoint(run, make_checkpoint(step), keep=2)
    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == ["step-00000030", "step-00000040"]
    assert (run.checkpoints / "latest").readlink() == Path("step-00000040")


def test_one_that_its_run_has_pruned_is_not_called_damaged(run: RunDirectory) -> None:
    first, second = (save_checkpoint(run, make_checkpoint(step), keep=1) for step in (1, 2))
    with pytest.raises(SlipstreamError, match="step-00000001 is not there any more") as caught:
        load_drafter_weights(first)
    assert caught.value.reason is Reason.CHECKPOINT_INVALID
    load_drafter_weights(second)


def test_a_rolled_back_run_prunes_the_dead_branch_first(run: RunDirectory) -> None:
    for step in (10, 20, 30):
        save_checkpoint(run, make_checkpoint(step), keep=3)
    run.claim(2, "trainers/b")
    save_checkpoint(run, make_checkpoint(20, incarnation=2), keep=2)
    # The dead branch's step 30 is newer by step, but older by lineage than the new step 20.
    assert newest_checkpoint(run.checkpoints) == run.checkpoints / "step-00000020"
    assert read_state(run.checkpoints / "step-00000020").incarnation == 2
    save_checkpoint(run, make_checkpoint(25, incarnation=2), keep=2)
    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == ["step-00000020", "step-00000025"]


def test_an_older_incarnation_writes_nothing(run: RunDirectory) -> None:
    save_checkpoint(run, make_checkpoint(10), keep=3)
    run.claim(2, "trainers/b")
    before = sorted(run.checkpoints.iterdir())
    with pytest.raises(SlipstreamError) as refused:
        save_checkpoint(run, make_checkpoint(20), keep=3)
    assert refused.value.reason is Reason.INCARNATION_STALE
    assert sorted(run.checkpoints.iterdir()) == before


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_is_named_with_the_sound_ones(run: RunDirectory, name: str, damage: str) -> None:
    save_checkpoint(run, make_checkpoint(10), keep=3)
    directory = save_checkpoint(run, make_checkpoint(20), keep=3)
    content = bytearray((directory / name).read_bytes())
    if damage == "missing":
        (directory / name).unlink()
    elif damage == "truncated":
        (directory / name).write_bytes(content[:-20])
    else:
        content[-30] ^= 0x40
        (directory / name).write_bytes(content)
    if name == "manifest.json" and damage == "flipped":
        content[2] ^= 0x40
        (directory / name).write_bytes(content)
    with pytest.raises(SlipstreamError) as refused:
        load_checkpoint(directory)
    assert refused.value.reason is Reason.CHECKPOINT_INVALID
    assert name in refused.value.message
    assert "step-00000010" in refused.value.remedy and "step-00000020" not in refused.value.remedy.split(":")[1]


def test_a_damaged_one_is_replaced_by_the_way_the_message_says(run: RunDirectory) -> None:
    older = save_checkpoint(run, make_checkpoint(10), keep=3)
    newer = save_checkpoint(run, make_checkpoint(20), keep=3)
    (newer / "drafter.safetensors").write_bytes(b"")
    with pytest.raises(SlipstreamError) as refused:
        load_checkpoint(newer)
    command = refused.value.remedy.partition("Resume from one: ")[2]
    subprocess.run(command.split(), check=True)
    found = newest_checkpoint(run.checkpoints)
    assert found == older and load_checkpoint(found).state.cursor.next_step == 10


def test_leftovers_of_a_killed_trainer_go_away(run: RunDirectory) -> None:
    leftover = run.checkpoints / ".unfinished-step-00000010"
    leftover.mkdir()
    (leftover / "drafter.safetensors").write_bytes(b"half")
    for link in ("latest", "best"):
        (run.checkpoints / f".{link}.4711").symlink_to("step-00000010")
    assert newest_checkpoint(run.checkpoints) is None
    save_checkpoint(run, make_checkpoint(20), keep=3)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step-00000020"]


def test_without_the_link_the_newest_by_lineage_counts(run: RunDirectory) -> None:
    save_checkpoint(run, make_checkpoint(30), keep=3)
    run.claim(2, "trainers/b")
    save_checkpoint(run, make_checkpoint(20, incarnation=2), keep=3)
    (run.checkpoints / "latest").unlink()
    assert newest_checkpoint(run.checkpoints) == run.checkpoints / "step-00000020"


KILLED_WHILE_REPLACING = """
import os, signal, sys
from pathlib import Path
from drafter_trainer.checkpoint import save_checkpoint
from drafter_trainer.run_directory import RunDirectory
from tests.unit.trainer_runtime.test_checkpoint import make_checkpoint

rename = Path.rename

def rename_or_die(source, target):
    if source.name.startswith(".unfinished-"):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(source, target)

Path.rename = rename_or_die
save_checkpoint(RunDirectory(Path(sys.argv[1])), make_checkpoint(30, incarnation=2), keep=1)
"""


def test_killed_while_one_is_replaced_the_old_one_is_still_found(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    """The new owner goes on from a rolled back checkpoint and comes past one that the old owner saved meanwhile."""
    save_checkpoint(run, make_checkpoint(30), keep=1)
    run.claim(2, "trainers/b")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_REPLACING, run.root], env=environment, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not (run.checkpoints / "latest").exists() and (run.checkpoints / "latest").is_symlink()

    with caplog.at_level(logging.WARNING):
        found = newest_checkpoint(run.checkpoints)
    assert "latest_points_nowhere" in caplog.text
    assert found is not None
    loaded = load_checkpoint(found)
    assert (loaded.state.incarnation, loaded.state.cursor.next_step) == (1, 30)
    run.claim(3, "trainers/c")
    final = save_checkpoint(run, make_checkpoint(40, incarnation=3), keep=1)
    assert newest_checkpoint(run.checkpoints) == final
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step-00000040"]


def test_one_is_replaced_although_a_killed_trainer_had_begun_to(run: RunDirectory) -> None:
    first = save_checkpoint(run, make_checkpoint(30), keep=2)
    (run.checkpoints / f".replaced-{first.name}").mkdir()
    (run.checkpoints / f".replaced-{first.name}" / "state.json").write_text("{}")
    run.claim(2, "trainers/b")
    save_checkpoint(run, make_checkpoint(30, incarnation=2), keep=2)
    assert read_state(first).incarnation == 2
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step-00000030"]


def test_a_directory_that_somebody_removed_is_passed_over(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    older = save_checkpoint(run, make_checkpoint(10), keep=3)
    newer = save_checkpoint(run, make_checkpoint(20), keep=3)
    newer.rename(run.root / "elsewhere")
    assert newest_checkpoint(run.checkpoints) == older
    assert "latest_points_nowhere" in caplog.text
    older.rename(run.root / "elsewhere-too")
    # With nothing left to go on from, the run is refused and not silently begun anew.
    missing = newest_checkpoint(run.checkpoints)
    assert missing == newer
    with pytest.raises(SlipstreamError, match="cannot be read") as refused:
        load_checkpoint(missing)
    assert refused.value.reason is Reason.CHECKPOINT_INVALID


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_leaves_the_previous_checkpoint_whole(small_disk: Path) -> None:
    run = RunDirectory(small_disk / "run")
    run.claim(1, "trainers/a")
    first = save_checkpoint(run, make_checkpoint(10, elements=50_000), keep=3)
    with pytest.raises(SlipstreamError) as refused:
        save_checkpoint(run, make_checkpoint(20, elements=90_000), keep=3)
    assert refused.value.reason is Reason.DISK_FULL
    assert "last complete checkpoint" in refused.value.remedy
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step-00000010"]
    assert newest_checkpoint(run.checkpoints) == first
    assert load_checkpoint(first).state.cursor.next_step == 10
    # And there is room again for one that fits.
    save_checkpoint(run, make_checkpoint(30, elements=1_000), keep=3)


def set_format(directory: Path, version: object) -> None:
    """In the manifest, as a writer of that version would."""
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | {"format_version": version}))


@pytest.mark.parametrize("read", [read_state, load_checkpoint, load_drafter_weights])
def test_a_newer_format_is_refused_in_words(run: RunDirectory, read: Callable[[Path], object]) -> None:
    directory = save_checkpoint(run, make_checkpoint(10), keep=3)
    set_format(directory, FORMAT_VERSION + 1)
    with pytest.raises(SlipstreamError) as refused:
        read(directory)
    assert refused.value.reason is Reason.CHECKPOINT_INVALID
    assert f"its format version is {FORMAT_VERSION + 1}, this one reads 1 to {FORMAT_VERSION}" in refused.value.message
    assert "Update Slipstream" in refused.value.remedy


@pytest.mark.parametrize("version", [0, "2", None])
def test_a_format_that_never_was_is_damage(run: RunDirectory, version: object) -> None:
    directory = save_checkpoint(run, make_checkpoint(10), keep=3)
    set_format(directory, version)
    with pytest.raises(SlipstreamError, match=f"is damaged: its format version is {version}, this trainer reads 1 to"):
        read_state(directory)


def test_a_run_does_not_begin_again_before_what_a_newer_version_saved(run: RunDirectory) -> None:
    older, newer = (save_checkpoint(run, make_checkpoint(step), keep=3) for step in (10, 20))
    set_format(newer, FORMAT_VERSION + 1)
    (run.checkpoints / "latest").unlink()
    assert newest_checkpoint(run.checkpoints) == newer
    # Somebody has decided to go on from the older one with this version: what the newer one wrote is not removed.
    (run.checkpoints / "latest").symlink_to(older.name)
    for step in (11, 12):
        save_checkpoint(run, make_checkpoint(step), keep=1)
    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == ["step-00000012", "step-00000020"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SlipstreamError) as refused:
        RunDirectory(blocked / "run")
    assert refused.value.reason is Reason.PATH_NOT_ALLOWED
    assert os.fspath(blocked) in refused.value.message
