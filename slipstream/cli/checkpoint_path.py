"""The checkpoint that RUN[@STEP] on a command line means, as a path on this machine: the control API knows the runs."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from slipstream.checkpoint_name import find_checkpoint, places_of, reported_steps, split_name
from slipstream.cli.api_access import control_api
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


def checkpoint_path(args: argparse.Namespace, text: str, command: str) -> str:
    """A path as it is; else where the control API says that the checkpoint of the run lies.

    Where no API answers, or it does not know the run, what lies here under the name stays for the process that is given
    it to find.

    Args:
        args: with the flags of `add_access_flags`.
        text: a path, or RUN, RUN@STEP, RUN@latest, RUN@best.
        command: what to type on the trainer's machine, with {} for the path.

    Raises:
        SlipstreamError: RUN_UNKNOWN or NOT_READY, and nothing lies here; CHECKPOINT_INVALID, there is no such
            checkpoint, or not on this machine.
    """
    if "/" in text or Path(text).exists():
        return text
    args.run, choice = split_name(text)
    try:
        chosen = _ask(args, choice)
    except SlipstreamError as error:
        if error.reason not in (Reason.RUN_UNKNOWN, Reason.NOT_READY):
            raise
        return _found_here(args, text, error)
    path = Path(chosen["path"])
    if not path.is_dir():
        raise _not_here(path, str(chosen["storage"]), command)
    return str(path)


def _ask(args: argparse.Namespace, choice: str) -> dict[str, Any]:
    from slipstream.control_client import segment

    with control_api(args) as client:
        found = {int(one["step"]): one for one in client.listing(f"/v1/runs/{segment(args.run)}/checkpoints")}
    best = next((step for step, one in found.items() if one.get("is_best")), None)
    paths = {step: str(one["path"]) for step, one in found.items()}
    return found[reported_steps(f"run {args.run}", paths, best).choose(choice)]


def _found_here(args: argparse.Namespace, text: str, refusal: SlipstreamError) -> str:
    """Below runs/ or in the local stack."""
    looked_for = places_of(args.run, args.home)
    if not looked_for:
        raise refusal
    if not any(directory.is_dir() for directory in looked_for):
        message = f"{refusal.message.removesuffix('.')}; nor is there {', '.join(map(str, looked_for))}"
        raise SlipstreamError(message, reason=refusal.reason, remedy=refusal.remedy) from refusal
    found = find_checkpoint(text, args.home)
    print(f"{refusal.message.removesuffix('.')}; taking {found}", file=sys.stderr)
    return str(found)


def _not_here(path: Path, storage: str, command: str) -> SlipstreamError:
    return SlipstreamError(
        f"the checkpoint lies at {path} on the trainer's machine ({storage}), not on this one",
        reason=Reason.CHECKPOINT_INVALID,
        remedy=f"Do it there: slipstream {command.format(shlex.quote(str(path)))}",
    )
