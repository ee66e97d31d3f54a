"""`slipstream data …`: starts `target-server inspect|index`, which needs the tokenizer; this process only shows."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.wire.data_report import DataReport


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("data", help="what becomes of conversations; index them ahead of a run")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    inspect = actions.add_parser(
        "inspect",
        help="tokens with the loss mask, lengths, what is cut and what is dropped, and why",
        description="Reads the first records of every file as a target server would; loads no weights, needs no GPU. "
        "Exit status: 0; 3 when nothing is usable, or with --strict when anything is dropped.",
    )
    index = actions.add_parser(
        "index",
        help="tokenize everything ahead of a run, so that the target server only maps it",
        description="Builds the index that a target server with the same tokenizer uses. Broken off, it goes on where "
        "it was. It lies in $SLIPSTREAM_INDEX_DIR, else in slipstream/documents of the user's cache directory.",
    )
    for action in (inspect, index):
        action.add_argument("sources", nargs="+", metavar="RECIPE|FILE", help="one recipe, or files with --model")
        action.add_argument(
            "--model", help="whose tokenizer: a directory, a hub name or a .gguf file; else the recipe's"
        )
        action.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override data.… or target.…"
        )
        action.add_argument("--strict", action="store_true", help="fail when a record is dropped")
        action.add_argument("-o", "--output", choices=("text", "json"), default="text")
    inspect.add_argument("--limit", metavar="N", help="records of each file; default: 10000")
    inspect.add_argument("--document", metavar="N", help="show all tokens of this document; default: some of the first")
    index.add_argument("--split", choices=("train", "heldout"), default="train", help="default: %(default)s")
    index.add_argument("--jobs", metavar="N", help="processes that tokenize; default: by size and cores")


def run(args: argparse.Namespace) -> int:
    """Let a process of the target server look, show what it found.

    Raises:
        SlipstreamError: SPEC_INVALID for a recipe that is none; DATA_INVALID when nothing is usable, or with --strict
            when something is dropped.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-data-") as directory:
        report = Path(directory) / "report.json"
        status = _run_target_server(args, report)
        if status:
            return status
        text = report.read_text(encoding="utf-8")
    if args.output == "json":
        print(text)
    return _show_inspection(text, args) if args.action == "inspect" else _show_index(text, args)


def _run_target_server(args: argparse.Namespace, report: Path) -> int:
    from slipstream.child_processes import child_process, exit_status, sigterm_as_exit

    flags = ["--report", str(report)]
    for name in ("model", "limit", "document", "split", "jobs"):
        value = getattr(args, name, None)
        if value is not None:
            flags += [f"--{name}", str(value)]
    for override in args.set:
        flags += ["--set", override]
    if args.action == "inspect":
        flags += ["--log-level", "warning"]
    command = [sys.executable, "-m", "target_server", args.action, *flags, "--", *_sources(args.sources)]
    with sigterm_as_exit(), child_process(command) as target_server:
        return exit_status(target_server)


def _sources(given: list[str]) -> list[str]:
    """The names of recipes that ship, as their paths."""
    from recipes import recipe_names
    from slipstream.cli.recipe_lookup import find_recipe

    return [
        str(find_recipe(name)) if name.removesuffix(".toml") in recipe_names() and not Path(name).exists() else name
        for name in given
    ]


def _show_inspection(text: str, args: argparse.Namespace) -> int:
    from slipstream.cli.data_view import inspection_view
    from slipstream.data_inspection import Inspection

    inspection = Inspection.model_validate_json(text)
    if args.output == "text":
        from rich.console import Console

        console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        for part in inspection_view(inspection, whole=args.document is not None, colour=console.is_terminal):
            console.print(part)
    return _judge(inspection.report, strict=args.strict)


def _show_index(text: str, args: argparse.Namespace) -> int:
    from slipstream.wire.data_report import DataReport

    report = DataReport.model_validate_json(text)
    if args.output == "text":
        print("\n".join(report.summary_lines()))
    return _judge(report, strict=args.strict)


def _judge(report: "DataReport", *, strict: bool) -> int:
    from slipstream.errors import SlipstreamError
    from slipstream.run_spec.reasons import Reason

    if report.used + report.other_split == 0:
        raise SlipstreamError(
            f"None of {report.read:,} records is usable.",
            reason=Reason.DATA_INVALID,
            remedy="The drops above say why; docs/data.md lists the layouts that are read.",
        )
    if strict and report.num_dropped:
        raise SlipstreamError(
            f"{report.num_dropped:,} of {report.read:,} records are dropped, and --strict is on.",
            reason=Reason.DATA_INVALID,
            remedy="Correct or remove the records that are named above, or leave --strict out.",
        )
    return 0
