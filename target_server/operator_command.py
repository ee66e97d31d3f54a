"""`target-server pause`, `resume` and `drain`: an operator's word to a server that runs, over its admin service."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from slipstream.hidden_states.v1 import stream_admin_service_pb2 as pb
from slipstream.listen import read_token
from slipstream.wire.ask_once import order_to
from slipstream.wire.channel import TargetClient

COMMANDS = ("pause", "resume", "drain")
_HELP = {
    "pause": "give a run no packs from now on: its trainer waits, the others have the target's time",
    "resume": "give a paused run packs again",
    "drain": "lease and compute nothing more, for good: what is leased is finished, trainers wait for the next server",
}


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the commands."""
    for name in COMMANDS:
        parser = commands.add_parser(name, help=_HELP[name])
        parser.add_argument("address", metavar="HOST:PORT", help="where the server listens")
        if name != "drain":
            parser.add_argument("run", metavar="RUN", help="its name")
        parser.add_argument("--token-file", type=Path, metavar="FILE", help="bearer token; else $SLIPSTREAM_TOKEN")
        parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
        parser.add_argument("--log-json", action="store_true", help="one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Tell the server; says in one line what holds from now on.

    Raises:
        SlipstreamError: SPEC_INVALID, TARGET_UNREACHABLE, LEDGER_UNWRITABLE, SUBSCRIPTION_UNKNOWN, STREAM_CLOSED,
            ACCESS_DENIED.
    """
    verbs: dict[str, Callable[[argparse.Namespace, TargetClient], str]] = {
        "pause": _pause,
        "resume": _resume,
        "drain": _drain,
    }
    with order_to(args.address, token=read_token(args.token_file)) as client:
        said = verbs[args.command](args, client)
    sys.stdout.write(said + "\n")
    return 0


def _pause(args: argparse.Namespace, client: TargetClient) -> str:
    client.pause_subscription(pb.PauseSubscriptionRequest(subscription=f"subscriptions/{args.run}"))
    return f"{args.run} gets no packs until: target-server resume {args.address} {args.run}"


def _resume(args: argparse.Namespace, client: TargetClient) -> str:
    client.resume_subscription(pb.ResumeSubscriptionRequest(subscription=f"subscriptions/{args.run}"))
    return f"{args.run} gets packs again"


def _drain(args: argparse.Namespace, client: TargetClient) -> str:
    client.drain_target(pb.DrainTargetRequest())
    return f"{args.address} finishes what is leased; runs go on where they were once it is started again"
