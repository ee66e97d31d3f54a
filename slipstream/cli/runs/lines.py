"""`slipstream run logs` and `slipstream run events`: what is there; with -f what comes, a log until its run rests."""

import argparse
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slipstream.cli.api_access import control_api, say_next
from slipstream.cli.display import local_time, print_json_line, print_line
from slipstream.cli.runs.detach import detachable
from slipstream.cli.runs.figures import Telling
from slipstream.control_client import ControlClient, FeedMessage, segment
from slipstream.errors import SlipstreamError
from slipstream.run_spec.states import AT_REST, RunState

_ALL = 10_000
"""The API keeps no more lines of a run."""
_DELETED = "the run was deleted"
_LEFT = "no longer following; run {} is not touched by that"


def logs(args: argparse.Namespace) -> int:
    """Print what the run's training processes logged."""

    def show(line: Mapping[str, Any]) -> None:
        print_json_line(line) if args.output == "json" else print_line(line["text"])

    with control_api(args) as client, detachable(lambda: _LEFT.format(args.run)) as outcome:
        tail = _ALL if args.tail is None else args.tail
        # Where the log ends is needed even if nothing of it is wanted.
        lines = list(client.listing(f"/v1/runs/{segment(args.run)}/logs", tail=max(tail, 1)))
        for line in lines if tail else ():
            show(line)
        if args.follow:
            cursor = str(lines[-1]["id"]) if lines else ""
            _follow_until_rest(client.log_feed(args.run, cursor, on_loss=say_lost), args.run, show)
        elif not lines and args.output == "text":
            print("nothing was logged yet", file=sys.stderr)
    if not args.follow:
        say_next(args, f"run logs {shlex.quote(args.run)} -f")
    return outcome.status


def events(args: argparse.Namespace) -> int:
    """Print what happened to the run."""
    telling = Telling()

    def show(event: Mapping[str, Any]) -> None:
        if args.output == "json":
            print_json_line(event)
        else:
            print_line(f"{local_time(event['time'])}  {telling.event(event)}")

    with control_api(args) as client, detachable(lambda: _LEFT.format(args.run)) as outcome:
        cursor = client.get(f"/v1/runs/{segment(args.run)}")["event_cursor"]
        known = deque(_events(client, args.run), maxlen=args.tail)
        newest = known[-1]["id"] if known else 0
        for event in known:
            show(event)
        if args.follow:
            # The list may reach further than the cursor that was read before it.
            _follow(
                client.feed(args.run, cursor, on_loss=say_lost),
                "event",
                lambda event: show(event) if event["id"] > newest else None,
            )
    if not args.follow:
        say_next(args, f"run events {shlex.quote(args.run)} -f")
    return outcome.status


def say_lost(why: SlipstreamError) -> None:
    """A stream was lost, and is tried again."""
    print(f"connection lost: {why.message}; trying again", file=sys.stderr)


def _events(client: ControlClient, run: str) -> Iterator[dict[str, Any]]:
    return client.listing(f"/v1/runs/{segment(run)}/events")


def _follow_until_rest(feed: Iterator[FeedMessage], run: str, show: Callable[[Mapping[str, Any]], None]) -> None:
    waits = False
    for message in feed:
        if message.kind == "log":
            show(message.data)
        elif message.kind == "deleted":
            print(_DELETED, file=sys.stderr)
        elif message.kind == "state":
            state = message.data["state"]
            if state in AT_REST:
                print(f"run {run} is {state}: this is the end of its log", file=sys.stderr)
                return
            is_paused = state == RunState.PAUSED
            if is_paused and not waits:
                print(f"run {run} is PAUSED; its log goes on when it is resumed", file=sys.stderr)
            waits = is_paused


def _follow(feed: Iterator[FeedMessage], kind: str, show: Callable[[Mapping[str, Any]], None]) -> None:
    for message in feed:
        if message.kind == kind:
            show(message.data)
        elif message.kind == "deleted":
            print(_DELETED, file=sys.stderr)
