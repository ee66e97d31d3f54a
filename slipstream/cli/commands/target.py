"""`slipstream target …`: the target servers that a control API knows, and an operator's word to them."""

import argparse
import shlex
from collections.abc import Mapping
from typing import Any

from slipstream.cli.api_access import add_api_flags, control_api, say_next
from slipstream.cli.display import ABSENT, Column, age, local_time, print_fields, print_json, print_line, print_table

_COLUMNS = (
    Column("NAME", may_wrap=True),
    Column("STATUS"),
    Column("MODEL", rank=1),
    Column("ADDRESS", rank=2),
    Column("CHECKED", is_number=True, rank=3),
    Column("DETAIL", rank=4),
)


_SUMMARIES = {
    "get": "one target, asked now whether it serves",
    "pause": "give a run no packs from now on: its trainer waits, the others have the target's time",
    "resume": "give a run packs again",
    "drain": "compute nothing more: what is leased is finished, trainers wait until the server is started again",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("target", help="target servers that a control API knows")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_api_flags(actions.add_parser("ls", help="list the targets"))
    for name, summary in _SUMMARIES.items():
        action = actions.add_parser(name, help=summary)
        action.add_argument("target", metavar="TARGET", help="its name")
        if name in ("pause", "resume"):
            action.add_argument("run", metavar="RUN", help="a run on that target")
        add_api_flags(action)


def run(args: argparse.Namespace) -> int:
    """Do what was asked.

    Raises:
        SlipstreamError: whatever the control API refuses.
    """
    return HANDLERS[args.action](args)


def _list(args: argparse.Namespace) -> int:
    with control_api(args) as client:
        targets = list(client.listing("/v1/targets"))
    if args.output == "json":
        print_json({"targets": targets})
        return 0
    if targets:
        print_table(_COLUMNS, [_row(target) for target in targets])
    else:
        print("no targets: a control API is told of them with --target NAME=ADDRESS")
    say_next(args, "run create RECIPE" if targets else "up")
    return 0


def _row(target: Mapping[str, Any]) -> tuple[str, ...]:
    checked = target["checked_at"]
    return (
        target["name"],
        target["status"],
        target["model"] or ABSENT,
        target["address"],
        f"{age(checked)} ago" if checked else ABSENT,
        target["detail"],
    )


def _get(args: argparse.Namespace) -> int:
    from slipstream.control_client import segment

    with control_api(args) as client:
        target = client.post(f"/v1/targets/{segment(args.target)}:probe")
    if args.output == "json":
        print_json(target)
        return 0
    print_fields(
        {
            "name": target["name"],
            "status": target["status"],
            "detail": target["detail"],
            "address": target["address"],
            "model": target["model"] or "not known yet",
            "revision": target["revision"] or "",
            "fingerprint": target["fingerprint"] or "",
            "version": target["server_version"] or "",
            "checked": local_time(target["checked_at"]),
            "registered": local_time(target["created_at"]),
        }
    )
    say_next(args, "run create RECIPE" if target["status"] == "REACHABLE" else "target ls")
    return 0


def _hold(args: argparse.Namespace) -> int:
    from slipstream.control_client import segment

    with control_api(args) as client:
        run = client.post(f"/v1/targets/{segment(args.target)}:{args.action}", {"run": args.run})
    if args.output == "json":
        print_json(run)
        return 0
    name = shlex.quote(args.run)
    if args.action == "pause":
        print_line(f"{args.target} gives {args.run} no packs from now on")
        say_next(args, f"target resume {shlex.quote(args.target)} {name}")
    else:
        print_line(f"{args.target} gives {args.run} packs again")
        say_next(args, f"run watch {name}")
    return 0


def _drain(args: argparse.Namespace) -> int:
    from slipstream.control_client import segment

    with control_api(args) as client:
        target = client.post(f"/v1/targets/{segment(args.target)}:drain")
    if args.output == "json":
        print_json(target)
        return 0
    print_line(f"{target['name']} finishes what is leased; runs go on where they were once it is started again")
    say_next(args, "target ls")
    return 0


HANDLERS = {"ls": _list, "get": _get, "pause": _hold, "resume": _hold, "drain": _drain}
