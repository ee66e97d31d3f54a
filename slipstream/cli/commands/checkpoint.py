"""`slipstream checkpoint`: `ls RUN` lists the complete checkpoints of a run, `export RUN[@STEP]` writes one."""

import argparse
import shlex
import sys
from typing import Any

from slipstream.cli.api_access import add_access_flags, add_api_flags, control_api, say_next
from slipstream.cli.checkpoint_path import checkpoint_path
from slipstream.cli.display import ABSENT, Column, local_time, print_json, print_table

_COLUMNS = (
    Column("STEP", is_number=True),
    Column("SAVED", rank=1),
    Column("PATH", may_wrap=True),
    Column("STORAGE", rank=3),
)
_MEASURED_COLUMNS = (
    Column("ACCEPTED LENGTH, HELD OUT", is_number=True),
    Column("BY SOURCE", rank=2),
    Column("BEST"),
)
"""Shown where any was measured."""

# Of `drafter-trainer export`, with the same meaning.
_PASSED_ON = (
    ("--target-model", "MODEL", "to decode with; default: the run's target.model"),
    ("--target-name", "NAME", "how servers will know the target; default: the run's target.model"),
    ("--dtype", "NAME", "float32, bfloat16 or float16; default: the target's in the run definition"),
    ("--eval", "FILE", "report of `slipstream eval` for the model card"),
    ("--device", "NAME", "where to decode: cpu (default), cuda"),
    ("--threads", "N", "CPU threads; default: one, which a busy CPU slows least"),
)
_SWITCHES = (
    ("--without-self-test", "do not decode with the files; the model card says so"),
    ("--force", "replace an earlier export"),
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("checkpoint", help="checkpoints of a run")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    ls = actions.add_parser("ls", help="list those that are complete, oldest first")
    ls.add_argument("run", metavar="RUN", help="its name")
    add_api_flags(ls)
    export = actions.add_parser("export", help="write one as vLLM, SGLang or z-lab read it, and decode with the files")
    export.add_argument(
        "run",
        metavar="RUN[@STEP]",
        help="a run's name or directory; default: its newest checkpoint; @best is the one that held-out answers chose",
    )
    export.add_argument("--to", required=True, choices=("vllm", "sglang", "zlab"), help="whose layout to write")
    export.add_argument("--output", required=True, metavar="DIR", help="directory to make")
    for flag, metavar, text in _PASSED_ON:
        export.add_argument(flag, metavar=metavar, help=text)
    for flag, text in _SWITCHES:
        export.add_argument(flag, action="store_true", help=text)
    add_access_flags(export)


def run(args: argparse.Namespace) -> int:
    """List, or export.

    Raises:
        SlipstreamError: RUN_UNKNOWN, or the control API cannot be reached; CHECKPOINT_INVALID, there is no such
            checkpoint on this machine.
    """
    return _export(args) if args.action == "export" else _list(args)


def _list(args: argparse.Namespace) -> int:
    from slipstream.cli.runs.next_steps import say_next_steps
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
        if owner["state"] == "SUCCEEDED":
            say_next(args, "run ls")
        else:
            say_next_steps(args, owner)
        return 0
    _print(found)
    best = "@best" if any(one.get("is_best") for one in found) else ""
    say_next(args, f"eval {shlex.quote(args.run + best)}")
    return 0


def _print(found: list[dict[str, Any]]) -> None:
    measures = any(one.get("heldout") for one in found)
    columns = [*_COLUMNS[:2], *(_MEASURED_COLUMNS if measures else ()), *_COLUMNS[2:]]
    rows = []
    for one in found:
        of_answers = _measured(one) if measures else ()
        rows.append((str(one["step"]), local_time(one["saved_at"]), *of_answers, one["path"], one["storage"]))
    print_table(columns, rows)


def _measured(one: dict[str, Any]) -> tuple[str, str, str]:
    from slipstream.cli.runs.figures import heldout_length, sources_words

    measured = one.get("heldout")
    sources = sources_words(measured) if measured else ""
    return heldout_length(measured), sources or ABSENT, "best" if one.get("is_best") else ""


def _export(args: argparse.Namespace) -> int:
    """Start `drafter-trainer export`, which needs torch; this process does not."""
    from slipstream.stand_in import run_for

    checkpoint = checkpoint_path(args, args.run, f"checkpoint export {{}} --to {args.to} --output DIR")
    command = ["export", checkpoint, "--to", args.to, "--output", args.output]
    for flag, *_ in _PASSED_ON:
        value = getattr(args, _attribute(flag))
        command += [flag, value] if value is not None else []
    command += [flag for flag, _ in _SWITCHES if getattr(args, _attribute(flag))]
    status = run_for("slipstream checkpoint export", "drafter_trainer", command)
    if status == 0:
        print(f"next: how to serve it is in {args.output}/README.md", file=sys.stderr)
    return status


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
