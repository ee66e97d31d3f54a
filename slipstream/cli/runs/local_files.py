"""Do the files exist that a run names? Asked before it is created, where its target server runs on this machine."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import recipes
from slipstream.control_client import ControlClient
from slipstream.errors import SlipstreamError
from slipstream.first_drafter import require_possible_first_drafter
from slipstream.listen import ListenAddress
from slipstream.run_spec.data_entries import GLOB, is_hub_name, split_glob
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from slipstream.run_spec.suggestions import nearest

_REMEDY = "Correct the path; a relative one starts at the recipe's directory."


def require_local_files(spec: RunSpec, client: ControlClient, target: str | None) -> None:
    """Refuse a run that names what is not here, where here is where it is read.

    That is known only where API and target server are reached over loopback: in containers, and on other machines, the
    same path means another file. Of hub names the API knows whether the target serves them.

    Args:
        spec: with the paths that the API is given.
        client: of that API.
        target: the target that the command line names; None: the only one.

    Raises:
        SlipstreamError: DATA_INVALID, MODEL_INVALID, CHECKPOINT_INVALID.
    """
    if not _is_loopback(urlsplit(client.address).netloc):
        return
    found = [one for one in client.listing("/v1/targets") if target in (None, one["name"])]
    if len(found) == 1 and _is_here(found[0]):
        require_files(spec, serves=found[0]["model"])


def require_files(spec: RunSpec, serves: str | None) -> None:
    """The same without a question; `serves` is the model that the target says it has."""
    for entry in spec.data.files:
        if not (is_hub_name(entry) or recipes.data_file(entry) or _exists(entry)):
            raise _missing("data.files", entry, Reason.DATA_INVALID)
    for key, file in (("eval.prompts", spec.eval.prompts), ("eval.heldout", spec.eval.heldout)):
        if file and not (recipes.data_file(file) or _exists(file)):
            raise _missing(key, file, Reason.DATA_INVALID)
    require_possible_first_drafter(spec.drafter.init_from)
    model = spec.target.model
    # A model that was moved since the target loaded it keeps its name.
    is_served = serves is not None and Path(serves).name == Path(model).name
    if not is_served and (Path(model).is_absolute() or model.endswith(".gguf")) and not _exists(model):
        raise _missing("target.model", model, Reason.MODEL_INVALID)


def _exists(entry: str) -> bool:
    path = Path(entry)
    if not path.is_absolute():  # it starts where the API says
        return True
    try:
        if path.exists() or not GLOB.search(entry):
            return path.exists()
        directory, pattern = split_glob(path)
        return any(directory.glob(pattern))
    except OSError:  # not ours to look at; perhaps the target server's
        return True


def _missing(key: str, entry: str, reason: Reason) -> SlipstreamError:
    path = Path(entry)
    neighbours: list[str] = []
    with suppress(OSError):
        neighbours = sorted(one.name for one in path.parent.iterdir())
    close = nearest(path.name, neighbours)
    made = "`slipstream data regenerate RECIPE --heldout` writes it. " if key == "eval.heldout" else ""
    return SlipstreamError(
        f"{key} names {entry}, which does not exist on this machine, where the target server would read it.",
        reason=reason,
        remedy=(f"Did you mean {path.parent / close}? " if close else "") + made + _REMEDY,
    )


def _is_here(target: Mapping[str, Any]) -> bool:
    address = target["address"]
    return address.startswith("unix:") or _is_loopback(address)


def _is_loopback(address: str) -> bool:
    try:
        return ListenAddress.parse(address if address.rpartition(":")[2].isdecimal() else f"{address}:80").is_loopback
    except SlipstreamError:
        return False
