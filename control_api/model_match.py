"""Whether a registered target serves the model that a run definition names, as far as names can tell.

The trainer asks the same of the target that it meets, and holds a run to the fingerprint that it began with.
"""

from typing import Any

from control_api.store.tables import Target
from slipstream import model_names


def other_model(spec: dict[str, Any], target: Target) -> str | None:
    """What is wrong with running `spec` on `target`, in a sentence; None when nothing is known to be."""
    if target.status != "REACHABLE":
        return None
    wanted = spec["target"]
    found = model_names.surely_differ(wanted["model"], wanted["revision"], target.model or "", target.revision)
    return None if found is None else f"Target {target.name!r} {found}."


def require_same_model(spec: dict[str, Any], target: Target) -> None:
    """Refuse what cannot be right.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE.
    """
    if (message := other_model(spec, target)) is not None:
        raise model_names.other_model_error(message, "Choose another target", target.model or "", target.revision)
