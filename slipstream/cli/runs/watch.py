"""`slipstream run watch`: a run until it rests, as one updating line on a terminal and as plain lines elsewhere."""

import argparse
import shlex
import time
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.cli.api_access import control_api, say_next
from slipstream.cli.display import is_terminal, make_console
from slipstream.cli.exit_status import DETACHED, RUN_FAILED, RUN_STOPPED
from slipstream.cli.runs import figures
from slipstream.cli.runs.detach import detachable
from slipstream.cli.runs.lines import say_lost
from slipstream.cli.runs.next_steps import say_next_steps
from slipstream.cli.runs.watch_screens import JsonLines, LiveLine, PlainLines, Screen
from slipstream.control_client import ControlClient, is_temporary, segment
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.states import AT_REST

_STATUS = {"SUCCEEDED": 0, "FAILED": RUN_FAILED, "STOPPED": RUN_STOPPED}
_PATIENCE_SECONDS = 120.0

Run = Mapping[str, Any]


def watch(args: argparse.Namespace) -> int:
    """Watch one run. The exit status says how it ended."""
    with control_api(args) as client:
        return watch_run(client, args, args.run)


def watch_run(client: ControlClient, args: argparse.Namespace, name: str, *, first: Run | None = None) -> int:
    """Watch the run until it rests, or until Ctrl-C.

    Args:
        client: of its control API.
        args: with `output` and `every`.
        name: of the run.
        first: the run as it was answered last; default: it is asked for.

    Raises:
        SlipstreamError: RUN_UNKNOWN, also when it is deleted meanwhile; the API is gone for too long.
    """
    run = first
    with detachable(lambda: _left(name, run)) as outcome:
        run = run or client.get(f"/v1/runs/{segment(name)}")
        with screen_for(args.output, args.every) as screen:
            if run["state"] not in AT_REST:  # its end is printed anyway
                screen.show(run)
            for run in _changes(client, run, screen):  # noqa: B020 - the newest one is what Ctrl-C tells of
                screen.show(run)
            screen.end(run)
        outcome.status = _STATUS[run["state"]]
    if outcome.status == DETACHED:
        say_next(args, f"run watch {shlex.quote(name)}", f"run stop {shlex.quote(name)}")
    elif run is not None:
        say_next_steps(args, run)
    return outcome.status


def screen_for(output: str, every_seconds: float) -> Screen:
    """What fits the terminal, the pipe or the format; plain lines every `every_seconds`."""
    if output == "json":
        return JsonLines()
    console = make_console()
    if is_terminal() and console.is_interactive:
        return LiveLine(console)
    return PlainLines(every_seconds)


def _changes(client: ControlClient, run: Run, screen: Screen) -> Iterator[Run]:
    """The run after each change; ends with the state at rest, once everything before that was seen."""
    if run["state"] in AT_REST:
        return
    for message in client.feed(run["name"], run["event_cursor"], on_loss=say_lost):
        if message.kind == "deleted":
            raise SlipstreamError(f"Run {run['name']!r} was deleted.", reason=Reason.RUN_UNKNOWN)
        screen.take(message)
        if message.kind == "metric":
            if words := figures.step_back(run["latest_metrics"], message.data["record"]):
                screen.say(words)
            run = figures.with_record(run, message.data["record"])
        elif message.kind == "event":
            run = _ask(client, run)
        yield run
        if run["state"] in AT_REST and _reaches(message.cursor, run["event_cursor"]):
            return


def _ask(client: ControlClient, run: Run) -> Run:
    """The run as it is now. The API may be away meanwhile, as it may be for the feed."""
    gives_up_at = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return client.get(f"/v1/runs/{segment(run['name'])}")
        except SlipstreamError as error:
            if not is_temporary(error) or time.monotonic() > gives_up_at:
                raise


def _reaches(cursor: str, goal: str) -> bool:
    """Whether everything up to `goal` was seen at `cursor`: both count events and metrics."""
    pairs = zip(cursor.split("-"), goal.split("-"), strict=True)
    return all(int(seen) >= int(wanted) for seen, wanted in pairs)


def _left(name: str, run: Run | None) -> str:
    where = f" ({run['state']}, step {figures.steps(run['progress'])})" if run else ""
    return f"detached: run {name} goes on{where}"
