"""Whether the drafter that a run begins with (`drafter.init_from`) is there: asked at its creation and at its start.

Who creates a run asks early, perhaps as another user than the trainer's, and refuses only what the start surely will.
"""

import os
from pathlib import Path

from slipstream.checkpoint_name import MANIFEST, chosen_checkpoint, first_of, saved_steps, split_name
from slipstream.drafter_name import RunName, also_no_path, drafter_name
from slipstream.errors import SlipstreamError
from slipstream.hub_drafter import HubDrafter, fetch_drafter, pinned
from slipstream.launcher.home import run_directories
from slipstream.run_spec.reasons import Reason

_REMEDY = "Give the trainer's path of a run, a checkpoint, or a drafter in one of the formats."
_MISSING = "no directory on this machine", _REMEDY
# The last is SpecForge's: the reader knows what to do about it.
_DRAFTERS = (MANIFEST, "config.json", "training_state.pt")
_CHECKPOINTS = ("latest", "step-*", ".replaced-step-*")


def find_first_drafter(named: str, runs: Path) -> Path:
    """Where the drafter of a `drafter.init_from` lies: asked by the trainer that begins with it. One of a hub is
    fetched; a run may stand for its newest checkpoint.

    Args:
        named: an absolute path, RUN[@STEP] or OWNER/NAME[@REVISION].
        runs: the directory of runs of this trainer, in which a run is looked for first.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming it.
    """
    meant = drafter_name(named, None)
    if isinstance(meant, HubDrafter):
        with also_no_path(named):
            return fetch_drafter(meant)
    if isinstance(meant, RunName):
        places = list(dict.fromkeys([runs / meant.run, *run_directories(meant.run)])) if meant.run else []
        directory = chosen_checkpoint(first_of(places, meant.run), meant.choice)
    else:
        directory = _of_path(meant)
    _refuse(named, _what_is_wrong(directory) or _what_is_not_ready(directory))
    return directory


def require_possible_first_drafter(named: str | None) -> None:
    """Refuse a `drafter.init_from` that holds no drafter: asked of a run that is to be created, on its trainer's
    machine. The run that it begins with may have its first checkpoint by then, and the trainer's user may read what
    this one may not. What is named otherwise than by a path is the control API's to find.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming it.
    """
    meant = None if named is None else drafter_name(named, None)
    if isinstance(meant, Path):
        _refuse(str(named), _what_is_wrong(_of_path(meant)))


def what_is_not_here(named: str | None) -> str | None:
    """What of a `drafter.init_from` is not to be had on this machine, in a sentence; None where all is.
    Asked by a plan, whose run may be trained on another machine.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, what is here is no drafter, or a run without such a checkpoint.
    """
    meant = None if named is None else drafter_name(named, None)
    if isinstance(meant, HubDrafter):
        try:
            pinned(meant)
        except SlipstreamError as error:
            return f"drafter.init_from is {named}, no path here, and {error.message}"
    elif isinstance(meant, RunName):
        places = run_directories(meant.run)
        if not any(place.is_dir() for place in places):
            listed = ", ".join(map(str, places))
            return f"drafter.init_from is {named}, neither a path here nor a run (looked for {listed})"
        chosen_checkpoint(first_of(places, meant.run), meant.choice)
    elif meant is not None:
        if _what_is_wrong(_of_path(meant)) == _MISSING:
            return f"drafter.init_from is {named}, which is {_MISSING[0]}"
        require_possible_first_drafter(named)
    return None


def _of_path(path: Path) -> Path:
    """The path itself, or PATH@STEP where PATH is a run's directory."""
    directory, choice = split_name(str(path))
    try:
        is_chosen = not path.exists() and bool(choice) and (Path(directory) / "checkpoints").is_dir()
    except OSError:  # it may not be looked at by this user
        return path
    return chosen_checkpoint(Path(directory), choice) if is_chosen else path


def _refuse(named: str, wrong: tuple[str, str] | None) -> None:
    if wrong is not None:
        found, remedy = wrong
        raise SlipstreamError(
            f"drafter.init_from is {named}, which is {found}", reason=Reason.CHECKPOINT_INVALID, remedy=remedy
        )


def _what_is_wrong(directory: Path) -> tuple[str, str] | None:
    """What there is in place of a drafter, and the remedy; None where there may be one."""
    try:
        if not directory.is_dir():
            return _what_its_run_has(directory.parent) or _MISSING
        if (directory / "checkpoints").is_dir() or any((directory / name).exists() for name in _DRAFTERS):
            return None
        return f"a directory without a drafter: neither {MANIFEST} nor config.json is in it", _REMEDY
    except PermissionError:
        return None
    except OSError as error:
        return f"a directory that cannot be read ({error.strerror})", _REMEDY


def _what_its_run_has(checkpoints: Path) -> tuple[str, str] | None:
    """In place of a checkpoint that is gone, where its run is there; None where it is not."""
    if checkpoints.name != "checkpoints" or not checkpoints.is_dir():
        return None
    there = ", ".join(map(str, sorted(saved_steps("", checkpoints).steps))) or "none"
    return (
        f"a checkpoint that its run does not keep any more (there: {there})",
        "Begin with one of these. A run keeps its newest, as many as its checkpoint.keep says, and the best.",
    )


def _what_is_not_ready(directory: Path) -> tuple[str, str] | None:
    """The same of what may be otherwise at another time, or for another user."""
    try:
        if not os.access(directory, os.R_OK | os.X_OK):
            return "a directory that may not be read", "Let the trainer's user read it."
        checkpoints = directory / "checkpoints"
        if checkpoints.is_dir() and not any(one for pattern in _CHECKPOINTS for one in checkpoints.glob(pattern)):
            return "a run that has no checkpoint yet", "Wait for its first one, or begin with another drafter."
    except OSError as error:
        return f"a directory that cannot be read ({error.strerror})", _REMEDY
    return None
