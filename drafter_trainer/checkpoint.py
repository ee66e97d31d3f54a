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
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from drafter_trainer.run_directory import RunDirectory, disk_errors_in_words
from drafter_trainer.safetensors_file import file_checksum, write_safetensors
from slipstream.disk import sync_directory
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event

FORMAT_VERSION = 1
_TENSOR_FILES = ("drafter", "optimizer", "rng")
_MANIFEST = "manifest.json"

_log = logging.getLogger(__name__)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cursor(_Record):
    """Where the run stands in its stream. Written with the weights that belong to it, never taken from a response."""

    next_step: int
    """The first step that these weights have not trained."""
    first_sequence_number: int
    """The pack with which step 0 begins."""
    quarantined: tuple[int, ...] = ()
    """Packs left out for their own fault."""


class LoopState(_Record):
    """What the loop has counted since step 0."""

    tokens: int = 0
    """Pack slots trained, padding included."""
    not_finite_steps: int = 0
    """Steps that were not applied, for a loss or a gradient that was not finite."""
    not_finite_in_row: int = 0


class CheckpointState(_Record):
    """Everything in a checkpoint that is not a tensor."""

    format_version: int = FORMAT_VERSION
    run: str
    incarnation: int
    cursor: Cursor
    loop: LoopState
    total_steps: int
    """Steps of the whole run; the learning rate is a function of step and this."""
    target_fingerprint: str
    stream: str
    spec: dict[str, Any]
    """The resolved run definition."""
    versions: dict[str, str]
    """Of python, torch, slipstream."""


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


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The directory to resume from: what `latest` points to; where that is nothing, the newest complete one."""
    latest = checkpoints / "latest"
    named = checkpoints / latest.readlink() if latest.is_symlink() else None
    if named is not None and named.exists():
        return named
    # A trainer was killed between two renames, or somebody has removed a directory.
    found = _by_age([*checkpoints.glob("step-[0-9]*"), *checkpoints.glob(".replaced-step-[0-9]*")])
    newest = found[-1] if found else named
    if named is not None:
        log_event(_log, "warning", "latest_points_nowhere", directory=str(named), instead=str(newest))
    return newest


def read_state(directory: Path) -> CheckpointState:
    """Only what decides whether a run may go on from here; the other files are not looked at.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID.
    """
    _verify(directory, ("state.json",))
    return _parse_state(directory)


def load_checkpoint(directory: Path) -> Checkpoint:
    """Verify sizes and checksums of all files, then read them.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming the damaged file and the older checkpoints that are sound.
    """
    _verify(directory, (*(f"{name}.safetensors" for name in _TENSOR_FILES), "drafter_config.json", "state.json"))
    drafter, optimizer, rng = (safetensors.torch.load_file(directory / f"{name}.safetensors") for name in _TENSOR_FILES)
    return Checkpoint(
        state=_parse_state(directory),
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
    _verify(directory, ("drafter.safetensors", "drafter_config.json"))
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
    _write_text(directory / _MANIFEST, json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=2))
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
    for directory in _by_age(checkpoints.glob("step-[0-9]*"))[:-keep]:
        if directory.name != protected:
            shutil.rmtree(directory)


def _by_age(directories: Iterable[Path]) -> list[Path]:
    """Checkpoints, oldest first: by incarnation, then by step. Unreadable ones come first."""

    def age(directory: Path) -> tuple[int, int, str]:
        try:
            state = read_state(directory)
        except SlipstreamError:
            return -1, -1, directory.name
        return state.incarnation, state.cursor.next_step, directory.name

    return sorted(directories, key=age)


def _verify(directory: Path, names: tuple[str, ...]) -> None:
    problem = _find_damage(directory, names)
    if problem is None:
        return
    others = [other.name for other in sorted(directory.parent.glob("step-[0-9]*")) if other.name != directory.name]
    sound = [name for name in others if _find_damage(directory.parent / name, None) is None]
    if sound:
        latest = directory.parent / "latest"
        remedy = f"Sound checkpoints here: {', '.join(sound)}. Resume from one: ln -sfn {sound[-1]} {latest}"
    else:
        remedy = "No other sound checkpoint lies beside it: restore the directory from a copy, or start a new run."
    raise SlipstreamError(
        f"Checkpoint {directory} is damaged: {problem}.", reason=Reason.CHECKPOINT_INVALID, remedy=remedy
    )


def _find_damage(directory: Path, names: tuple[str, ...] | None) -> str | None:
    """What is wrong with the named files (all: None), in words; None when they are as they were written."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_text())
        if manifest["format_version"] != FORMAT_VERSION:
            return f"its format version is {manifest['format_version']}, this trainer reads {FORMAT_VERSION}"
        files = manifest["files"]
        for name in names or files:
            size, checksum = file_checksum(directory / name)
            if size != files[name]["size"]:
                return f"{name} has {size} bytes, {files[name]['size']} were written"
            if checksum != files[name]["crc32c"]:
                return f"{name} has another checksum than when it was written"
    except OSError as error:
        return f"{Path(str(error.filename)).name} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError) as error:
        return f"{_MANIFEST} cannot be understood ({error})"
    return None


def _parse_state(directory: Path) -> CheckpointState:
    try:
        return CheckpointState.model_validate_json((directory / "state.json").read_text())
    except ValidationError as error:
        raise SlipstreamError(
            f"Checkpoint {directory} cannot be understood: state.json: {error.errors()[0]['msg']}.",
            reason=Reason.CHECKPOINT_INVALID,
            remedy="It may come from another version of Slipstream; resume with that one.",
        ) from error
