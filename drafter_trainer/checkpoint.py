"""⑬ Checkpoints: weights, optimizer, RNG, loop state and cursor, saved as one directory that is complete or absent.

    step-00000042/{drafter.safetensors, drafter_config.json, optimizer.safetensors, rng.safetensors, state.json,
                   manifest.json}

`step-00000042` has trained 42 steps: 0 … 41. `drafter.safetensors` (float32, names as in the DFlash formats; the moving
average of a run that keeps one, whose masters are then with the optimizer) and `drafter_config.json` are all that
evaluation needs. `latest` is a symbolic link, replaced atomically, and so is `best`: the checkpoint with the largest
held-out estimate among those that are here, which is never removed to make room. There is none before one was measured.

The tensors are written beside the others without the run directory's lock, for they take long; the rest is written, and
all of it put into its place, under the lock, by the incarnation that still owns the run then.
`.unfinished-*` and `.replaced-*` are what a killed trainer can leave behind: one half written or half deleted, an old
one that was about to make room for a new one of the same name; `.latest.*` and `.best.*`, links not yet renamed.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from torch import Tensor

from drafter_trainer.checkpoint_state import (
    FORMAT_VERSION,
    CheckpointState,
    HeldoutEstimate,
    best_checkpoint,
    by_age,
    file_checksum,
    newest_checkpoint,
    parse_state,
    read_state,
    verify,
)
from drafter_trainer.run_directory import RunDirectory, disk_errors_in_words
from drafter_trainer.safetensors_file import write_safetensors
from slipstream.checkpoint_name import MANIFEST
from slipstream.disk import sync_directory
from slipstream.errors import SlipstreamError

_TENSOR_FILES = ("drafter", "optimizer", "rng")
_LINKS = ("latest", "best")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory; tensors are on the CPU after loading, and may be anywhere for saving."""

    state: CheckpointState
    drafter_config: str
    """Canonical JSON of the DrafterConfig."""
    drafter: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    rng: Mapping[str, Tensor]


def save_checkpoint(
    run: RunDirectory,
    checkpoint: Checkpoint,
    *,
    keep: int,
    incarnation_held: Callable[[], AbstractContextManager[int]] | None = None,
) -> Path:
    """Save, point `latest` at it and `best` at the best, and remove all but that and the newest `keep`.

    Returns the directory.

    Args:
        run: where.
        checkpoint: `state.incarnation` is replaced by the one that holds when everything is put into its place.
        keep: at least one.
        incarnation_held: of the process that saves, kept from changing within the context; None: it does not change.

    Raises:
        SlipstreamError: INCARNATION_STALE when a newer trainer owns the run (nothing is written, or what was is
            removed); DISK_FULL, with the previous checkpoint untouched and the unfinished one removed.
    """
    held = incarnation_held or (lambda: nullcontext(checkpoint.state.incarnation))
    final = run.checkpoints / f"step-{checkpoint.state.cursor.next_step:08d}"
    with disk_errors_in_words(final), ExitStack() as removed:
        with held() as incarnation, run.owned(incarnation):
            _remove_leftovers(run.checkpoints)
            # No two processes ever have the same incarnation: the name is this one's alone.
            unfinished = run.checkpoints / f".unfinished-{final.name}.{incarnation}"
            unfinished.mkdir()
            removed.callback(shutil.rmtree, unfinished, ignore_errors=True)
        try:
            files = _write_tensors(unfinished, checkpoint)
        except OSError:
            # A newer trainer that has taken over removes what an older one writes: that is no fault of the disk.
            with held() as incarnation, run.owned(incarnation):
                raise
        with held() as incarnation, run.owned(incarnation):
            _write_the_rest(unfinished, checkpoint, incarnation, files)
            _put_into_place(unfinished, final)
            best = best_checkpoint(run.checkpoints)
            protected = {final.name} if best is None else {final.name, best.name}
            superseded = _set_aside(run.checkpoints, keep=keep, protected=protected)
        # Deleting gigabytes takes a while, too.
        for directory in superseded:
            shutil.rmtree(directory, ignore_errors=True)
    return final


def go_on_from(run: RunDirectory, directory: Path, incarnation: int) -> None:
    """Point `latest` at the checkpoint that `incarnation`, which owns the run now, has begun from.

    A trainer that it was taken over from may have saved a newer one since. That one is a dead branch: were this trainer
    killed before its first save, the next must not continue there, for the target server has been told otherwise.

    Raises:
        SlipstreamError: INCARNATION_STALE.
    """
    with run.owned(incarnation), disk_errors_in_words(directory):
        if newest_checkpoint(run.checkpoints) != directory:
            _point(run.checkpoints / "latest", directory.name)


def load_checkpoint(directory: Path) -> Checkpoint:
    """Verify sizes and checksums of all files, then read them.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming the damaged file and the older checkpoints that are sound.
    """
    verify(directory, (*(f"{name}.safetensors" for name in _TENSOR_FILES), "drafter_config.json", "state.json"))
    drafter, optimizer, rng = (safetensors.torch.load_file(directory / f"{name}.safetensors") for name in _TENSOR_FILES)
    return Checkpoint(
        state=parse_state(directory),
        drafter_config=(directory / "drafter_config.json").read_text(),
        drafter=drafter,
        optimizer=optimizer,
        rng=rng,
    )


def load_drafter_weights(directory: Path) -> tuple[str, dict[str, Tensor]]:
    """(canonical JSON of the DrafterConfig, float32 weights by name) of a checkpoint directory, verified.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID.
    """
    verify(directory, ("drafter.safetensors", "drafter_config.json"))
    weights = safetensors.torch.load_file(directory / "drafter.safetensors")
    return (directory / "drafter_config.json").read_text(), weights


def _write_tensors(directory: Path, checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Entries of the manifest."""
    files: dict[str, dict[str, int]] = {}
    for name in _TENSOR_FILES:
        size, checksum = write_safetensors(directory / f"{name}.safetensors", getattr(checkpoint, name))
        files[f"{name}.safetensors"] = {"size": size, "crc32c": checksum}
    return files


def _write_the_rest(
    directory: Path, checkpoint: Checkpoint, incarnation: int, files: Mapping[str, dict[str, int]]
) -> None:
    manifest = dict(files)
    state = checkpoint.state.model_copy(update={"incarnation": incarnation})
    texts = {"drafter_config.json": checkpoint.drafter_config, "state.json": state.model_dump_json(indent=2)}
    for name, text in texts.items():
        _write_text(directory / name, text)
        size, checksum = file_checksum(directory / name)
        manifest[name] = {"size": size, "crc32c": checksum}
    _write_text(directory / MANIFEST, json.dumps({"format_version": FORMAT_VERSION, "files": manifest}, indent=2))
    sync_directory(directory)


def _put_into_place(unfinished: Path, final: Path) -> None:
    """Rename, and point `latest` at it; under the lock."""
    replaced = final.parent / f".replaced-{final.name}"
    if final.exists():
        # A dead branch of the lineage: an older incarnation had been here before it was rolled back. `latest` may
        # point to it, so it is kept whole until the new one is in its place.
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    unfinished.rename(final)
    # First `best`: whatever `latest` has ever pointed to was then compared with it.
    _point_best(final.parent)
    _point(final.parent / "latest", final.name)
    for leftover in final.parent.glob(".replaced-*"):
        shutil.rmtree(leftover)


def _remove_leftovers(checkpoints: Path) -> None:
    """What a killed trainer left behind, or one that has been taken over from still writes; under the lock."""
    for leftover in checkpoints.glob(".unfinished-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for link in _LINKS:
        for leftover in checkpoints.glob(f".{link}.*"):
            leftover.unlink()


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _point_best(checkpoints: Path) -> None:
    """At the best of all that are here and were measured on the same answers as the newest; the older on a tie.

    All are looked at, so that a trainer killed between two renames leaves nothing that the next save does not mend.
    """
    found = [(directory, _estimate_of(directory)) for directory in by_age(checkpoints.glob("step-[0-9]*"))]
    measured = [(directory, estimate) for directory, estimate in found if estimate is not None]
    if not measured:
        return
    answers = measured[-1][1].answers
    best, _ = max(
        ((directory, estimate) for directory, estimate in measured if estimate.answers == answers),
        key=lambda one: one[1].accepted_length,
    )
    if best_checkpoint(checkpoints) != best:
        _point(checkpoints / "best", best.name)


def _estimate_of(directory: Path) -> HeldoutEstimate | None:
    """None for a damaged checkpoint, too: it is none."""
    try:
        return read_state(directory).heldout
    except SlipstreamError:
        return None


def _point(link: Path, name: str) -> None:
    """Make or replace a symbolic link in one go."""
    fresh = link.parent / f".{link.name}.{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(name)
    fresh.replace(link)
    sync_directory(link.parent)


def _set_aside(checkpoints: Path, *, keep: int, protected: Collection[str]) -> list[Path]:
    """Rename all but the newest `keep` and `protected`, so that nobody takes them for checkpoints; under the lock."""
    superseded = []
    for directory in by_age(checkpoints.glob("step-[0-9]*"))[:-keep]:
        if directory.name not in protected:
            aside = checkpoints / f".unfinished-deletion-of-{directory.name}"
            shutil.rmtree(aside, ignore_errors=True)
            superseded.append(directory.rename(aside))
    return superseded
