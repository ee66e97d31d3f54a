"""Whether the drafter that a run begins with (`drafter.init_from`) is there: asked at its creation and at its start.

Who creates a run asks early, perhaps as another user than the trainer's, and refuses only what the start surely will.
"""

import os
from pathlib import Path

from slipstream.checkpoint_name import MANIFEST
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_REMEDY = "Give the trainer's path of a run, a checkpoint, or a drafter in one of the formats."
# The last is SpecForge's: the reader knows what to do about it.
_DRAFTERS = (MANIFEST, "config.json", "training_state.pt")
_CHECKPOINTS = ("latest", "step-*", ".replaced-step-*")


def require_first_drafter(named: str | None) -> None:
    """Refuse a `drafter.init_from` that holds no drafter: asked by the trainer that begins with it.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming it.
    """
    if named is not None:
        _refuse(named, _what_is_wrong(Path(named)) or _what_is_not_ready(Path(named)))


def require_possible_first_drafter(named: str | None) -> None:
    """The same of a run that is to be created, on its trainer's machine. The run that it begins with may have its first
    checkpoint by then, and the trainer's user may read what this one may not.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming it.
    """
    if named is not None:
        _refuse(named, _what_is_wrong(Path(named)))


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
            return "no directory on this machine", _REMEDY
        if (directory / "checkpoints").is_dir() or any((directory / name).exists() for name in _DRAFTERS):
            return None
        return f"a directory without a drafter: neither {MANIFEST} nor config.json is in it", _REMEDY
    except PermissionError:
        return None
    except OSError as error:
        return f"a directory that cannot be read ({error.strerror})", _REMEDY


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
