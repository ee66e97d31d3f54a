"""`target-server inspect` and `index`: what becomes of a recipe's data, without a target's weights or a server."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from slipstream.errors import SlipstreamError
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.overrides import apply_overrides, parse_override
from slipstream.run_spec.problems import describe_problem
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DataSpec, TargetSpec

COMMANDS = ("inspect", "index")
DEFAULT_LIMIT = 10_000


class _Given(BaseModel):
    """The two tables of a recipe that say what documents are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: TargetSpec
    data: DataSpec


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register both commands."""
    inspect = commands.add_parser("inspect", help="look at the first records of a recipe's data")
    index = commands.add_parser(
        "index", help="tokenize a recipe's data ahead of a run; goes on where it was broken off"
    )
    for parser in (inspect, index):
        parser.add_argument("sources", nargs="+", metavar="RECIPE|FILE", help="a recipe (.toml), or files of data")
        parser.add_argument("--model", help="whose tokenizer: directory, hub name or .gguf file; else the recipe's")
        parser.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override data.… or target.…"
        )
        parser.add_argument(
            "--report", type=Path, required=True, metavar="FILE", help="receives what was found, as JSON"
        )
        parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
        parser.add_argument("--log-json", action="store_true", help="one JSON object a line")
    inspect.add_argument(
        "--limit", type=_number, default=DEFAULT_LIMIT, metavar="N", help="records of each file; default: %(default)d"
    )
    inspect.add_argument(
        "--document", type=_number, default=1, metavar="N", help="whose tokens to report; default: %(default)d"
    )
    index.add_argument("--split", choices=("train", "heldout"), default="train", help="default: %(default)s")
    index.add_argument("--jobs", type=_number, metavar="N", help="processes that tokenize; default: by size and cores")


def run(args: argparse.Namespace) -> int:
    """Do what was asked for and write the report.

    Raises:
        SlipstreamError: whatever is refused.
    """
    target, data = read_sources(args.sources, args.model, args.set)
    from slipstream.target_loading import load_tokenizer
    from target_server.data_files import find_files
    from target_server.dataset import load_documents

    files = find_files(data.files, None)
    tokenizer = load_tokenizer(target)
    if args.command == "index":
        dataset = load_documents(data, tokenizer, files=files, split=args.split, jobs=args.jobs)
        text = dataset.report.model_dump_json()
    else:
        from target_server.inspection import inspect_files

        text = inspect_files(
            data, files, tokenizer, model=target.model, limit=args.limit, document=args.document
        ).model_dump_json()
    _write(args.report, text)
    return 0


def read_sources(sources: Sequence[str], model: str | None, overrides: Sequence[str]) -> tuple[TargetSpec, DataSpec]:
    """Target and data of a recipe, or of files and flags.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    recipes = [source for source in sources if source.endswith(".toml")]
    if recipes and len(sources) > 1:
        raise SlipstreamError(
            f"{recipes[0]} is a recipe, which names its data itself; {len(sources) - 1} other files are given.",
            reason=Reason.SPEC_INVALID,
            remedy="Give one recipe, or files alone.",
        )
    if recipes:
        spec = load_recipe(Path(recipes[0]), overrides).spec
        return (spec.target if model is None else spec.target.model_copy(update={"model": model})), spec.data
    table: dict[str, Any] = {"data": {"files": list(sources)}, "target": {"model": model} if model else {}}
    apply_overrides(table, [parse_override(override) for override in overrides])
    if not table["target"].get("model"):
        raise SlipstreamError(
            "Files alone do not say which tokenizer is meant.",
            reason=Reason.SPEC_INVALID,
            remedy="Name the target with --model: a directory, a hub name or a .gguf file.",
        )
    try:
        given = _Given.model_validate_json(json.dumps(table), strict=True)
    except ValidationError as error:
        problems = [describe_problem(each, {}) for each in error.errors(include_url=False)]
        raise SlipstreamError(
            "; ".join(problems) + ".", reason=Reason.SPEC_INVALID, remedy="Correct the --set flags."
        ) from error
    return given.target, given.data


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SlipstreamError(
            f"The report {path} cannot be written: {error.strerror}.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Name a file in a writable directory with --report.",
        ) from error


def _number(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
