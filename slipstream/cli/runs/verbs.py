"""`slipstream run pause|resume|stop|delete`: what a person asks of a run."""

import argparse
import shlex
import sys
import time
from typing import Any

from slipstream.cli.api_access import control_api, say_next
from slipstream.cli.display import print_json, print_line
from slipstream.cli.exit_status import RUN_FAILED, RUN_STOPPED, WAITED_IN_VAIN
from slipstream.cli.runs import figures
from slipstream.cli.runs.detach import detachable
from slipstream.cli.runs.next_steps import say_next_steps
from slipstream.control_client import ControlClient, is_temporary, segment
from slipstream.errors import SlipstreamError

_LOOK_SECONDS = 0.5
_GOALS = {
    "pause": ("PAUSED",),
    "resume": ("RUNNING", "SUCCEEDED"),
    # A run may reach its end while it is being stopped.
    "stop": ("STOPPED", "SUCCEEDED"),
}
_OTHER_ENDS = {"FAILED": RUN_FAILED, "STOPPED": RUN_STOPPED, "SUCCEEDED": 14}
"""Where a run rests otherwise; 14 as for every state in which a verb is not possible."""


def apply_verb(args: argparse.Namespace) -> int:
    """Ask for it; with --wait, until it is so."""
    with control_api(args) as client:
        run = client.post(f"/v1/runs/{segment(args.run)}:{args.action}")
        status = 0
        with detachable(lambda: f"no longer waiting; run {args.run} is told to {args.action} all the same") as outcome:
            if args.wait:
                run, status = _wait(client, run, _GOALS[args.action], args.timeout)
        if outcome.status:
            say_next(args, f"run watch {shlex.quote(args.run)}")
            return outcome.status
    if args.output == "json":
        print_json(run)
        return status
    print_line(f"{run['name']} {figures.state_words(run)}")
    if status == WAITED_IN_VAIN:
        goal = _GOALS[args.action][0]
        print(f"not {goal} after {args.timeout:g} s; what was asked for stays asked for", file=sys.stderr)
    say_next_steps(args, run)
    return status


def delete(args: argparse.Namespace) -> int:
    """Forget the run, and say where its files are, if a trainer had it."""
    with control_api(args) as client:
        path = f"/v1/runs/{segment(args.run)}"
        run = client.get(path)
        checkpoints = list(client.listing(f"{path}/checkpoints"))
        client.delete(path)
    paths = [one["path"] for one in checkpoints]
    if args.output == "json":
        print_json({"deleted": run["name"], "directory": run["directory"], "checkpoints": paths})
        return 0
    print_line(f"{run['name']} is forgotten")
    if paths or any(one["state"] == "STARTING" for one in run["history"]):
        kept = f"; its newest checkpoint is {paths[-1]}" if paths else ""
        print_line(f"its files stay in {run['directory']} below the trainer's directory of runs{kept}")
    say_next(args, "run ls")
    return 0


def _wait(
    client: ControlClient, run: dict[str, Any], goals: tuple[str, ...], seconds: float
) -> tuple[dict[str, Any], int]:
    """The run once it has reached one of the states, or another rest, or the time is up; and the exit status."""
    gives_up_at = time.monotonic() + seconds
    while run["state"] not in goals:
        if run["state"] in _OTHER_ENDS:
            return run, _OTHER_ENDS[run["state"]]
        if time.monotonic() > gives_up_at:
            return run, WAITED_IN_VAIN
        time.sleep(_LOOK_SECONDS)
        try:
            run = client.get(f"/v1/runs/{segment(run['name'])}")
        except SlipstreamError as error:
            if not is_temporary(error) or time.monotonic() > gives_up_at:
                raise
    return run, 0
