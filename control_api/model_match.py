"""Whether a target serves the model that a run definition names, as far as names can tell.

A target says how its model was given to it: a hub name with the commit that was loaded, or the name of a local
directory or file. A copy of a hub model may be called anything, so only this is known for sure: two different hub
names, or two different commits of one, are two models. Everything else is left to the trainer, which holds a run to the
fingerprint that it began with.
"""

import re
from typing import Any

from control_api.store.tables import Target
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def other_model(spec: dict[str, Any], target: Target) -> str | None:
    """What is wrong with running `spec` on `target`, in a sentence; None when nothing is known to be."""
    wanted, served = spec["target"]["model"], target.model or ""
    if target.status != "REACHABLE" or not (_is_hub_name(wanted) and _is_hub_name(served)):
        return None
    revision = spec["target"]["revision"] or ""
    if wanted.casefold() != served.casefold():
        return f"Target {target.name!r} serves {served}, the run is defined for {wanted}."
    if _COMMIT.fullmatch(revision) and _COMMIT.fullmatch(target.revision or "") and revision != target.revision:
        return f"Target {target.name!r} serves commit {target.revision} of {served}, the run is defined for {revision}."
    return None


def require_same_model(spec: dict[str, Any], target: Target) -> None:
    """Refuse what cannot be right.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE.
    """
    if (message := other_model(spec, target)) is not None:
        raise SlipstreamError(
            message,
            reason=Reason.TARGET_INCOMPATIBLE,
            remedy="Choose another target, or say in the definition what this one serves: "
            f"target.model={target.model}" + (f", target.revision={target.revision}." if target.revision else "."),
        )


def _is_hub_name(model: str) -> bool:
    return _HUB_NAME.fullmatch(model) is not None and not model.endswith(".gguf")
