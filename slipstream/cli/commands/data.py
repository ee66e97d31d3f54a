"""`slipstream data …`: starts `target-server inspect|index|regenerate`, which needs torch; this process only shows."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

_PASSED_ON = {
    *("model", "limit", "document", "split", "jobs"),
    *("to", "heldout", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "batch", "device", "threads"),
}

if TYPE_CHECKING:
    from slipstream.wire.data_report import DataReport


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("data", help="what becomes of conversations; index or regenerate them")
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
    regenerate = actions.add_parser(
        "regenerate",
        help="let the target answer the prompts: drafters learn best from the target's own text",
        description="Writes token rows that `data.files` can name. Broken off, it goes on where it was.",
    )
    for action in (inspect, index, regenerate):
        action.add_argument("sources", nargs="+", metavar="RECIPE|FILE", help="one recipe, or files with --model")
        action.add_argument(
            "--model", help="whose tokenizer: a directory, a hub name or a .gguf file; else the recipe's"
        )
        action.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="override a recipe's setting; of files: data.… or target.…",
        )
        action.add_argument("--strict", action="store_true", help="fail when a record is dropped")
        action.add_argument("-o", "--output", choices=("text", "json"), default="text")
    inspect.add_argument("--limit", metavar="N", help="records of each file; default: 10000")
    inspect.add_argument("--document", metavar="N", help="show all tokens of this document; default: some of the first")
    index.add_argument("--split", choices=("train", "heldout"), default="train", help="default: %(default)s")
    index.add_argument("--jobs", metavar="N", help="processes that tokenize; default: by size and cores")
    _add_sampling(regenerate)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", metavar="FILE", help="receives the answers; settings lie beside it")
    parser.add_argument(
        "--heldout",
        action="store_true",
        help="answer the recipe's eval.prompts greedily, into its eval.heldout: what drafters are measured on while "
        "they train",
    )
    parser.add_argument(
        "--max-new-tokens", metavar="N", help="of an answer; default: 1024, with --heldout always eval.max_new_tokens"
    )
    parser.add_argument("--temperature", metavar="T", help="0 is greedy, the default")
    parser.add_argument("--top-p", metavar="P", help="default: 1")
    parser.add_argument("--top-k", metavar="K", help="default: all tokens")
    parser.add_argument("--seed", metavar="N", help="default: 0")
    parser.add_argument(
        "--batch",
        metavar="N",
        help="prompts at once; default: as many as the file was begun with, else 256 on a GPU, 16 on a CPU",
    )
    parser.add_argument("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N; default: auto")
    parser.add_argument("--threads", metavar="N", help="CPU threads")


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
    return _show_inspection(text, args) if args.action == "inspect" else _show_report(text, args)


def _run_target_server(args: argparse.Namespace, report: Path) -> int:
    from slipstream.stand_in import run_for

    flags = ["--report", str(report)]
    for name, value in vars(args).items():
        if name in _PASSED_ON and value not in (None, False):
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    for override in args.set:
        flags += ["--set", override]
    if args.action == "inspect":
        flags += ["--log-level", "warning"]
    words = [args.action, *flags, "--", *_sources(args.sources)]
    return run_for(f"slipstream data {args.action}", "target_server", words)


def _sources(given: list[str]) -> list[str]:
    """The names of recipes that ship, as their paths."""
    from recipes import recipe_names, recipe_path

    return [
        str(recipe_path(name)) if name.removesuffix(".toml") in recipe_names() and not Path(name).exists() else name
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


def _show_report(text: str, args: argparse.Namespace) -> int:
    from slipstream.counted import counted
    from slipstream.wire.data_report import DataReport

    report = DataReport.model_validate_json(text)
    if args.output == "text" and args.action == "index":
        print("\n".join(report.summary_lines()))
    elif args.output == "text":
        where = f" in {args.to}" if args.to else ""
        print(f"{counted(report.read, 'prompt')} read: {report.used:,} answered{where}, {report.num_dropped:,} dropped")
        print("".join(f"dropped {entry.in_words()}\n" for entry in report.dropped), end="")
    return _judge(report, strict=args.strict)


def _judge(report: "DataReport", *, strict: bool) -> int:
    from slipstream.errors import SlipstreamError
    from slipstream.run_spec.reasons import Reason

    if report.read == 0:
        raise SlipstreamError(
            "The files hold no record at all.",
            reason=Reason.DATA_INVALID,
            remedy="Look whether they are those that are meant; docs/data.md lists the layouts that are read.",
        )
    if report.used + report.other_split == 0:
        raise SlipstreamError(
            f"None of {report.read:,} records is usable." if report.read > 1 else "The only record is not usable.",
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
