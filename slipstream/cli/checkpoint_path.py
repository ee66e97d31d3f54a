"""The checkpoint that RUN[@STEP] on a command line means, as a path on this machine: the control API knows the runs."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

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
    args.run, _, step = text.partition("@")
    try:
        chosen = _ask(args, step)
    except SlipstreamError as error:
        if error.reason not in (Reason.RUN_UNKNOWN, Reason.NOT_READY):
            raise
        return _found_here(args, step, error)
    path = Path(chosen["path"])
    if step == "best":
        path = path.parent / "best"
    if not path.is_dir():
        raise _not_here(args, step, path, str(chosen["storage"]), command)
    return str(path)


def _ask(args: argparse.Namespace, step: str) -> dict[str, Any]:
    from slipstream.control_client import segment

    with control_api(args) as client:
        found = list(client.listing(f"/v1/runs/{segment(args.run)}/checkpoints"))
    # A link beside them says which one is the best.
    newest = step in ("", "latest", "best")
    wanted = [one for one in found if newest or str(one["step"]) == step.lstrip("0")]
    if not wanted:
        there = ", ".join(str(one["step"]) for one in found) or "none"
        raise SlipstreamError(
            f"run {args.run} has no checkpoint {'yet' if newest else f'of step {step}'}, expected one of: {there}",
            reason=Reason.CHECKPOINT_INVALID,
            remedy=f"`slipstream checkpoint ls {shlex.quote(args.run)}` lists them.",
        )
    return max(wanted, key=lambda one: int(one["step"]))


def _found_here(args: argparse.Namespace, step: str, refusal: SlipstreamError) -> str:
    """The run's directory here, below runs/ or in the local stack, and the step as it was given."""
    from slipstream.launcher.home import run_directories

    looked_for = [Path(args.run), *run_directories(args.run, args.home)] if args.run else []
    for directory in looked_for:
        if directory.is_dir():
            print(f"{refusal.message.removesuffix('.')}; taking {directory}", file=sys.stderr)
            return f"{directory}@{step}" if step else str(directory)
    if not looked_for:
        raise refusal
    places = ", ".join(map(str, looked_for))
    raise SlipstreamError(
        f"{refusal.message.removesuffix('.')}; nor is there {places}", reason=refusal.reason, remedy=refusal.remedy
    ) from refusal


def _not_here(args: argparse.Namespace, step: str, path: Path, storage: str, command: str) -> SlipstreamError:
    if step == "best" and path.parent.is_dir():
        return SlipstreamError(
            f"run {args.run} has no best checkpoint: none was measured while it trained",
            reason=Reason.CHECKPOINT_INVALID,
            remedy="Leave @best out for the newest; a run with eval.heldout measures its checkpoints.",
        )
    return SlipstreamError(
        f"the checkpoint lies at {path} on the trainer's machine ({storage}), not on this one",
        reason=Reason.CHECKPOINT_INVALID,
        remedy=f"Do it there: slipstream {command.format(shlex.quote(str(path)))}",
    )
