"""`slipstream checkpoint ls RUN`: the complete checkpoints of a run, on the trainers' disks."""

import argparse
import shlex

from slipstream.cli.api_access import add_api_flags, control_api, say_next
from slipstream.cli.display import Column, local_time, print_json, print_table

_COLUMNS = (
    Column("STEP", is_number=True),
    Column("SAVED", rank=1),
    Column("PATH", may_wrap=True),
    Column("STORAGE", rank=2),
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("checkpoint", help="checkpoints of a run")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    ls = actions.add_parser("ls", help="list those that are complete, oldest first")
    ls.add_argument("run", metavar="RUN", help="its name")
    add_api_flags(ls)


def run(args: argparse.Namespace) -> int:
    """Print them.

    Raises:
        SlipstreamError: RUN_UNKNOWN, or the control API cannot be reached.
    """
    from slipstream.cli.runs.figures import next_commands
    from slipstream.control_client import segment
    from slipstream.run_spec.states import AT_REST

    with control_api(args) as client:
        path = f"/v1/runs/{segment(args.run)}"
        found = list(client.listing(f"{path}/checkpoints"))
        owner = {} if found else client.get(path)
    if args.output == "json":
        print_json({"checkpoints": found})
        return 0
    if not found:
        at_rest = owner["state"] in AT_REST
        print("no checkpoint" if at_rest else "no checkpoint yet")
        say_next(args, *(next_commands(owner) if owner["state"] != "SUCCEEDED" else ["run ls"]))
        return 0
    print_table(
        _COLUMNS, [(str(one["step"]), local_time(one["saved_at"]), one["path"], one["storage"]) for one in found]
    )
    say_next(args, f"eval {shlex.quote(found[-1]['path'])}")
    return 0
