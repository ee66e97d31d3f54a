"""What is known of a checkpoint without its tensors: which is the newest, whether it is sound, where it stands.

No torch here: a wrong path is refused before torch is imported.
"""

import json
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import google_crc32c
from pydantic import BaseModel, ConfigDict, ValidationError

from slipstream.checkpoint_name import MANIFEST
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event

FORMAT_VERSION = 2
"""Raised with whatever a reader must understand, so that an older one refuses it in words. Every version from 1 on is
read: 1 has no `heldout` in state.json, no `architecture` in drafter_config.json, and a recipe without what is newer."""
_BLOCK_BYTES = 1 << 24

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


class HeldoutEstimate(_Record):
    """What these weights would be accepted of, measured while the run trained; see `heldout`."""

    accepted_length: float
    """Tokens a round, bonus included, over all sources: every round weighs the same."""
    by_source: dict[str, float]
    answers: str
    """Names the held-out answers: estimates on others do not compare."""


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
    """Of python, torch, slipstream; and the machine."""
    heldout: HeldoutEstimate | None = None
    """None where nothing was measured: no eval.heldout, or a checkpoint out of turn, saved because the run was told to
    stop."""


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The directory to resume from: what `latest` points to; where that is nothing, the newest complete one."""
    latest = checkpoints / "latest"
    named = checkpoints / latest.readlink() if latest.is_symlink() else None
    if named is not None and named.exists():
        return named
    # A trainer was killed between two renames, or somebody has removed a directory.
    found = by_age([*checkpoints.glob("step-[0-9]*"), *checkpoints.glob(".replaced-step-[0-9]*")])
    newest = found[-1] if found else named
    if named is not None:
        log_event(_log, "warning", "latest_points_nowhere", directory=str(named), instead=str(newest))
    return newest


def best_checkpoint(checkpoints: Path) -> Path | None:
    """What `best` points to, if that is there."""
    best = checkpoints / "best"
    named = checkpoints / best.readlink() if best.is_symlink() else None
    return named if named is not None and named.exists() else None


def read_state(directory: Path) -> CheckpointState:
    """Only what decides whether a run may go on from here; the other files are not looked at.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID.
    """
    verify(directory, ("state.json",))
    return parse_state(directory)


def by_age(directories: Iterable[Path]) -> list[Path]:
    """Checkpoints, oldest first: by incarnation, then by step. Damaged ones come first; last what a newer version of
    Slipstream wrote, so that no run begins again before it, and none removes it."""

    def age(directory: Path) -> tuple[float, int, str]:
        if _newer_format(directory) is not None:
            return math.inf, 0, directory.name
        try:
            state = read_state(directory)
        except SlipstreamError:
            return -1, -1, directory.name
        return state.incarnation, state.cursor.next_step, directory.name

    return sorted(directories, key=age)


def verify(directory: Path, names: tuple[str, ...]) -> None:
    """Compare sizes and checksums of the named files with the manifest.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming the damaged file and the older checkpoints that are sound; or it is
            of a newer format version, or gone.
    """
    _require_known_format(directory)
    problem = _find_damage(directory, names)
    if problem is None:
        return
    others = [other.name for other in sorted(directory.parent.glob("step-[0-9]*")) if other.name != directory.name]
    sound = [name for name in others if _find_damage(directory.parent / name, None) is None]
    if sound and not directory.is_dir():
        raise SlipstreamError(
            f"Checkpoint {directory} is not there any more: its run keeps only the newest ones and the best.",
            reason=Reason.CHECKPOINT_INVALID,
            remedy="Name the newest one, or pause the run first: it removes none then.",
        )
    if sound:
        latest = directory.parent / "latest"
        remedy = f"Sound checkpoints here: {', '.join(sound)}. Resume from one: ln -sfn {sound[-1]} {latest}"
    else:
        remedy = "No other sound checkpoint lies beside it: restore the directory from a copy, or start a new run."
    raise SlipstreamError(
        f"Checkpoint {directory} is damaged: {problem}.", reason=Reason.CHECKPOINT_INVALID, remedy=remedy
    )


def _require_known_format(directory: Path) -> None:
    """What a newer version wrote is not damaged, and no copy of it would help."""
    if (found := _newer_format(directory)) is not None:
        raise SlipstreamError(
            f"Checkpoint {directory} was written by a newer Slipstream: its format version is {found}, this one reads "
            f"1 to {FORMAT_VERSION}.",
            reason=Reason.CHECKPOINT_INVALID,
            remedy="Update Slipstream here, or go on with the version that wrote it.",
        )


def _newer_format(directory: Path) -> int | None:
    """The version, if it is newer than this Slipstream."""
    try:
        found = json.loads((directory / MANIFEST).read_text())["format_version"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # damage, of which all is said elsewhere
    return found if isinstance(found, int) and found > FORMAT_VERSION else None


def _find_damage(directory: Path, names: tuple[str, ...] | None) -> str | None:
    """What is wrong with the named files (all: None), in words; None when they are as they were written."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if manifest["format_version"] not in range(1, FORMAT_VERSION + 1):
            return f"its format version is {manifest['format_version']}, this trainer reads 1 to {FORMAT_VERSION}"
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
        return f"{MANIFEST} cannot be understood ({error})"
    return None


def parse_state(directory: Path) -> CheckpointState:
    """Read state.json, which was verified before.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID.
    """
    try:
        return CheckpointState.model_validate_json((directory / "state.json").read_text())
    except ValidationError as error:
        raise SlipstreamError(
            f"Checkpoint {directory} cannot be understood: state.json: {error.errors()[0]['msg']}.",
            reason=Reason.CHECKPOINT_INVALID,
            remedy="It may come from another version of Slipstream; resume with that one.",
        ) from error


def file_checksum(path: Path) -> tuple[int, int]:
    """(bytes, crc32c) of a file.

    Raises:
        OSError: it cannot be read.
    """
    checksum = google_crc32c.Checksum()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum.update(block)
            size += len(block)
    return size, int.from_bytes(checksum.digest(), "big")
