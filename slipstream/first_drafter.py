"""Whether the drafter that a run begins with (`drafter.init_from`) is there: asked at its creation and at its start."""

import os
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_REMEDY = "Give the trainer's path of a run, a checkpoint, or a drafter in one of the formats."
_MANIFEST = "manifest.json"
# The last is SpecForge's: the reader knows what to do about it.
_DRAFTERS = (_MANIFEST, "config.json", "training_state.pt")


def require_first_drafter(named: str | None) -> None:
    """Refuse a `drafter.init_from` that holds no drafter on this machine, which must be the trainer's.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, naming it.
    """
    found, remedy = (None, "") if named is None else _what_is_wrong(Path(named))
    if found is not None:
        raise SlipstreamError(
            f"drafter.init_from is {named}, which is {found}", reason=Reason.CHECKPOINT_INVALID, remedy=remedy
        )


def _what_is_wrong(directory: Path) -> tuple[str | None, str]:
    """What there is in place of a drafter, and the remedy; None where there is one."""
    try:
        if not directory.is_dir():
            return "no directory on this machine", _REMEDY
        if not os.access(directory, os.R_OK | os.X_OK):
            return "a directory that may not be read", "Let the trainer's user read it."
        checkpoints = directory / "checkpoints"
        if checkpoints.is_dir():
            if any(one for pattern in ("latest", "step-*", ".replaced-step-*") for one in checkpoints.glob(pattern)):
                return None, ""
            return "a run that has no checkpoint yet", "Wait for its first one, or begin with another drafter."
        if any((directory / name).exists() for name in _DRAFTERS):
            return None, ""
    except OSError as error:
        return f"a directory that cannot be read ({error.strerror})", _REMEDY
    return f"a directory without a drafter: neither {_MANIFEST} nor config.json is in it", _REMEDY
