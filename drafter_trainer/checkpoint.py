"""⑫ Checkpoints: weights, optimizer, RNG, loop state and cursor, saved as one directory that is complete or absent.

    step-00000042/{drafter.safetensors, drafter_config.json, optimizer.safetensors, rng.safetensors, state.json,
                   manifest.json}

`step-00000042` has trained 42 steps: 0 … 41. `drafter.safetensors` (float32, names as in the DFlash formats; the moving
average of a run that keeps one, whose masters are then with the optimizer) and `drafter_config.json` are all that
evaluation needs. `latest` is a symbolic link, replaced atomically.
`.unfinished-*` and `.replaced-*` are what a killed trainer can leave behind: a new one half written, an old one that
was about to make room for a new one of the same name.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from torch import Tensor

from drafter_trainer.checkpoint_state import (
    FORMAT_VERSION,
    MANIFEST,
    CheckpointState,
    by_age,
    file_checksum,
    parse_state,
    verify,
)
from drafter_trainer.run_directory import RunDirectory, disk_errors_in_words
from drafter_trainer.safetensors_file import write_safetensors
from slipstream.disk import sync_directory

_TENSOR_FILES = ("drafter", "optimizer", "rng")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory; tensors are on the CPU after loading, and may be anywhere for saving."""

    state: CheckpointState
    drafter_config: str
    """Canonical JSON of the DrafterConfig."""
    drafter: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    rng: Mapping[str, Tensor]


def save_checkpoint(run: RunDirectory, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Save, point `latest` at it, and remove all but the newest `keep`; returns the directory.

    Raises:
        SlipstreamError: INCARNATION_STALE when a newer trainer owns the run (nothing is written); DISK_FULL, with
            the previous checkpoint untouched and the unfinished one removed.
    """
    final = run.checkpoints / f"step-{checkpoint.state.cursor.next_step:08d}"
    temporary = run.checkpoints / f".unfinished-{final.name}"
    replaced = run.checkpoints / f".replaced-{final.name}"
    with run.owned(checkpoint.state.incarnation), disk_errors_in_words(final):
        # What a killed trainer left behind; under the lock nobody else is writing one.
        for leftover in run.checkpoints.glob(".unfinished-*"):
            shutil.rmtree(leftover)
        try:
            _write(temporary, checkpoint)
            if final.exists():
                # A dead branch of the lineage: an older incarnation had been here before it was rolled back. `latest`
                # may point to it, so it is kept whole until the new one is in its place.
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _point_latest(run.checkpoints, final.name)
        for leftover in run.checkpoints.glob(".replaced-*"):
            shutil.rmtree(leftover)
        _prune(run.checkpoints, keep=keep, protected=final.name)
    return final


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


def _write(directory: Path, checkpoint: Checkpoint) -> None:
    directory.mkdir()
    files: dict[str, dict[str, int]] = {}
    for name in _TENSOR_FILES:
        size, checksum = write_safetensors(directory / f"{name}.safetensors", getattr(checkpoint, name))
        files[f"{name}.safetensors"] = {"size": size, "crc32c": checksum}
    texts = {
        "drafter_config.json": checkpoint.drafter_config,
        "state.json": checkpoint.state.model_dump_json(indent=2),
    }
    for name, text in texts.items():
        _write_text(directory / name, text)
        size, checksum = file_checksum(directory / name)
        files[name] = {"size": size, "crc32c": checksum}
    _write_text(directory / MANIFEST, json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=2))
    sync_directory(directory)


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _point_latest(checkpoints: Path, name: str) -> None:
    link = checkpoints / f".latest.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(checkpoints / "latest")
    sync_directory(checkpoints)


def _prune(checkpoints: Path, *, keep: int, protected: str) -> None:
    for directory in by_age(checkpoints.glob("step-[0-9]*"))[:-keep]:
        if directory.name != protected:
            shutil.rmtree(directory)
