"""Whether two names of a model surely mean two models. Torch-free.

A target says how its model was given to it: a hub name with the commit that was loaded, or the name of a local
directory or file. A copy of a hub model may be called anything, so only this is known for sure: two different hub
names, or two different commits of one, are two models. Everything else is left to the fingerprint.
"""

import re

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_model(name: str) -> bool:
    """Whether a model of a hub may be called so, OWNER/NAME; a relative path may be, too."""
    return _HUB_NAME.fullmatch(name) is not None and not name.endswith(".gguf")


def surely_differ(wanted: str, wanted_revision: str | None, served: str, served_revision: str | None) -> str | None:
    """What is served and what was wanted, "serves …, the run is defined for …"; None when nothing is known against it.

    Args:
        wanted: as a run definition has it.
        wanted_revision: the same.
        served: as the target says.
        served_revision: the commit that it has loaded, if it knows one.
    """
    if not (is_hub_model(wanted) and is_hub_model(served)):
        return None
    if wanted.casefold() != served.casefold():
        return f"serves {served}, the run is defined for {wanted}"
    commits = wanted_revision or "", served_revision or ""
    if all(map(_COMMIT.fullmatch, commits)) and wanted_revision != served_revision:
        return f"serves commit {served_revision} of {served}, the run is defined for {wanted_revision}"
    return None


def other_model_error(message: str, choose: str, served: str, served_revision: str | None) -> SlipstreamError:
    """The refusal; `choose`: how to take another target."""
    revision = f", target.revision={served_revision}" if served_revision else ""
    return SlipstreamError(
        message,
        reason=Reason.TARGET_INCOMPATIBLE,
        remedy=f"{choose}, or say in the definition what this one serves: target.model={served}{revision}.",
    )
