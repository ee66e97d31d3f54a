"""`target-server inspect|length|index|regenerate`: a recipe's data without a server; only the last loads weights."""

import argparse
import json
import math
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from recipes import find_recipe
from slipstream.counted import counted
from slipstream.data_answers import answers_remark
from slipstream.engine_devices import check_present
from slipstream.errors import SlipstreamError
from slipstream.flag_values import THREADS, TOKENS, within
from slipstream.packaged_model import target_here
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.overrides import apply_overrides, parse_override
from slipstream.run_spec.problems import problems_of
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import MAX_EPOCHS, DataSpec, DrafterSpec, EvalSpec, TargetSpec
from slipstream.stand_in import own_help

if TYPE_CHECKING:
    from slipstream.target_loading import LoadedTarget
    from target_server.record_files import SourceFile

Files: TypeAlias = "Sequence[SourceFile]"

_MAX_NEW_TOKENS = 1024
COMMANDS = ("inspect", "length", "index", "regenerate")
DEFAULT_LIMIT = 10_000
_RECORDS = within(int, 1, 1_000_000_000, "number of records")
_DOCUMENT = within(int, 1, 1_000_000_000, "number of a document")
_EPOCHS = within(int, 1, MAX_EPOCHS, "number of epochs")
_PROMPTS = within(int, 1, 1_000_000_000, "number of prompts")
_PROCESSES = within(int, 1, 4096, "number of processes")


@dataclass(frozen=True)
class Wanted:
    """Whose tokenizer reads which data."""

    target: TargetSpec
    data: DataSpec
    drafter: DrafterSpec | None = None
    """Of a recipe; files alone have none."""
    evaluation: EvalSpec | None = None
    """The same."""


class _Given(BaseModel):
    """The two tables of a recipe that say what documents are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: TargetSpec
    data: DataSpec


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the commands."""
    inspect = commands.add_parser("inspect", help="look at the first records of a recipe's data")
    index = commands.add_parser(
        "index", help="tokenize a recipe's data ahead of a run; goes on where it was broken off"
    )
    length = commands.add_parser("length", help="how many packs the epochs of a recipe have; downloads nothing")
    regenerate = commands.add_parser("regenerate", help="let the target answer a recipe's prompts; goes on as well")
    for parser in (inspect, length, index, regenerate):
        parser.add_argument("sources", nargs="+", metavar="RECIPE|FILE", help="a recipe (.toml), or files of data")
        parser.add_argument("--model", help="whose tokenizer: directory, hub name or .gguf file; else the recipe's")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="override a recipe's setting; of files: data.… or target.…",
        )
        parser.add_argument(
            "--report", type=Path, required=True, metavar="FILE", help=own_help("receives what was found, as JSON")
        )
        levels = ("debug", "info", "warning", "error")
        parser.add_argument("--log-level", choices=levels, default="info", help=own_help(None))
        parser.add_argument("--log-json", action="store_true", help=own_help("one JSON object a line"))
    inspect.add_argument(
        "--limit", type=_RECORDS, default=DEFAULT_LIMIT, metavar="N", help="records of each file; default: %(default)d"
    )
    inspect.add_argument(
        "--document", type=_DOCUMENT, default=1, metavar="N", help="whose tokens to report; default: %(default)d"
    )
    length.add_argument("--epochs", type=_EPOCHS, required=True, metavar="N", help="passes over the data")
    _add_sampling(regenerate)
    index.add_argument("--split", choices=("train", "heldout"), default="train", help="default: %(default)s")
    index.add_argument(
        "--jobs", type=_PROCESSES, metavar="N", help="processes that tokenize; default: by size and cores"
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", type=Path, metavar="FILE", help="receives the answers, as JSONL")
    parser.add_argument(
        "--heldout", action="store_true", help="answer the recipe's eval.prompts instead of its data, greedily"
    )
    parser.add_argument("--max-new-tokens", type=TOKENS, metavar="N", help=f"default: {_MAX_NEW_TOKENS}")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy, the default")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: %(default)g")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="default: all tokens")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)d")
    parser.add_argument("--batch", type=_PROMPTS, metavar="N", help="prompts at once; default: by the device")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=THREADS, metavar="N", help="CPU threads")


def run(args: argparse.Namespace) -> int:
    """Do what was asked for and write the report.

    Raises:
        SlipstreamError: whatever is refused.
    """
    from target_server.data_files import find_files

    wanted = read_sources(args.sources, args.model, args.set)
    wanted = replace(wanted, target=target_here(wanted.target, sys.stderr.write))
    if getattr(args, "heldout", False):
        _write(args.report, _answer_heldout(args, wanted).model_dump_json())
        return 0
    files = find_files(wanted.data.files, None)
    _write(args.report, _ACTIONS[args.command](args, wanted, files).model_dump_json())
    return 0


@contextmanager
def said_when_slow(words: str, seconds: float = 1.0) -> Iterator[None]:
    """Write `words` to stderr when the block takes longer than that."""
    timer = threading.Timer(seconds, lambda: sys.stderr.write(f"{words}\n"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _inspect(args: argparse.Namespace, wanted: Wanted, files: Files) -> BaseModel:
    target = wanted.target
    with said_when_slow(f"reading the tokenizer of {target.model} …"):
        from slipstream.mask_token import vocabulary_rows
        from slipstream.target_files import locate_tokenizer
        from slipstream.target_loading import load_tokenizer
        from target_server.inspection import inspect_files
        from target_server.mask_remark import mask_remark

        tokenizer = load_tokenizer(target)
    inspection = inspect_files(
        wanted.data, files, tokenizer, model=target.model, limit=args.limit, document=args.document
    )
    if wanted.drafter is None:
        return inspection
    located = locate_tokenizer(target)
    # A GGUF file has a row for each of its tokens, and no more.
    rows = len(tokenizer) if located.is_gguf else vocabulary_rows(located.root)
    remarks = (mask_remark(wanted.drafter, tokenizer, rows), answers_remark(wanted.data.files, target.model))
    return inspection.model_copy(update={"remarks": tuple(filter(None, remarks))})


def _length(args: argparse.Namespace, wanted: Wanted, files: Files) -> BaseModel:
    from slipstream.target_files import files_at_hand, model_error
    from slipstream.target_loading import load_tokenizer
    from target_server.epoch_length import measure_epochs

    if files_at_hand(wanted.target) is None:
        raise model_error(
            f"the tokenizer of {wanted.target.model} is not on this machine", "Download the model, or name its path."
        )
    return measure_epochs(wanted.data, files, load_tokenizer(wanted.target), args.epochs)


def _index(args: argparse.Namespace, wanted: Wanted, files: Files) -> BaseModel:
    with said_when_slow(f"reading the tokenizer of {wanted.target.model} …"):
        from slipstream.target_loading import load_tokenizer
        from target_server.dataset import load_documents

        tokenizer = load_tokenizer(wanted.target)
    return load_documents(wanted.data, tokenizer, files=files, split=args.split, jobs=args.jobs).report


def _answer_heldout(args: argparse.Namespace, wanted: Wanted) -> BaseModel:
    from target_server.answers_file import default_batch, require_writable
    from target_server.heldout_answers import answer_heldout, prompts_of
    from target_server.regeneration import Sampling

    evaluation = wanted.evaluation
    if evaluation is None:
        raise _not_heldout("--heldout is about the [eval] table of a recipe, but files are given")
    if (args.temperature, args.top_p, args.top_k, args.seed, args.max_new_tokens) != (0.0, 1.0, 0, 0, None):
        raise _not_heldout("--heldout answers greedily, with eval.max_new_tokens, but flags ask for something else")
    output = args.to or (Path(evaluation.heldout) if evaluation.heldout else None)
    if output is None:
        raise SlipstreamError(
            "Nothing says where the answers go: the recipe has no eval.heldout.",
            reason=Reason.SPEC_INVALID,
            remedy='Add heldout = "heldout.jsonl" to the [eval] table of the recipe (of a copy, if it ships with '
            "Slipstream): its runs read that file. Or name another with --to.",
        )
    prompts = prompts_of(evaluation)
    device = _device(args.device)
    require_writable(output)  # makes directories, so only once nothing else is wrong
    sampling = Sampling(evaluation.max_new_tokens, batch=args.batch or default_batch(output, device))
    loaded, whose = _load_answering(args, wanted.target, device)
    return answer_heldout(loaded, prompts, output, sampling=sampling, settings=whose)


def _not_heldout(problem: str) -> SlipstreamError:
    return SlipstreamError(
        f"{problem}.",
        reason=Reason.SPEC_INVALID,
        remedy="Give one recipe that names eval.prompts and eval.heldout (or --to), and leave --temperature, --top-p, "
        "--top-k, --seed and --max-new-tokens out.",
    )


def _device(asked: str) -> str:
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", asked):
        raise SlipstreamError(
            f"--device names {asked!r}.", reason=Reason.SPEC_INVALID, remedy="Name auto, cpu, cuda or cuda:N."
        )
    check_present([asked], torch.cuda.device_count(), "--device")
    return asked


def _load_answering(args: argparse.Namespace, target: TargetSpec, device: str) -> "tuple[LoadedTarget, dict[str, Any]]":
    """The target that answers, and what is recorded of it."""
    import torch

    from slipstream.target_fingerprint import fingerprint_target
    from slipstream.target_loading import load_causal_lm

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with said_when_slow(f"loading {target.model} …"):
        loaded = load_causal_lm(target, device)
        fingerprint = fingerprint_target(loaded.files, target.dtype)
    return loaded, {"target": target.model, "target_fingerprint": fingerprint}


def _regenerate(args: argparse.Namespace, wanted: Wanted, files: Files) -> BaseModel:
    from target_server.answers_file import default_batch, require_writable
    from target_server.dataset import hash_content
    from target_server.regeneration import Regenerator, Sampling, regenerate

    if args.to is None:
        raise SlipstreamError(
            "Nothing says where the answers go.", reason=Reason.SPEC_INVALID, remedy="Name a file with --to."
        )
    max_new_tokens = args.max_new_tokens or _MAX_NEW_TOKENS
    device = _device(args.device)
    batch = args.batch or default_batch(args.to, device)
    sampling = Sampling(max_new_tokens, args.temperature, args.top_p, args.top_k, args.seed, batch)
    # Not a number (nan) is in no range.
    if not 0 <= sampling.temperature < math.inf or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise SlipstreamError(
            f"No text is drawn with temperature {sampling.temperature:g}, top-p {sampling.top_p:g} and top-k "
            f"{sampling.top_k}.",
            reason=Reason.SPEC_INVALID,
            remedy="The temperature is 0 or more, top-p above 0 and at most 1, top-k 0 (all tokens) or more.",
        )
    require_writable(args.to)
    data = wanted.data
    loaded, whose = _load_answering(args, wanted.target, device)
    settings = {**asdict(sampling), "format": data.format, "data": hash_content(files, data), **whose}
    return regenerate(Regenerator(loaded, sampling), files, args.to, settings=settings, record_format=data.format)


_ACTIONS = {"inspect": _inspect, "length": _length, "index": _index, "regenerate": _regenerate}


def read_sources(sources: Sequence[str], model: str | None, overrides: Sequence[str]) -> Wanted:
    """Target and data of a recipe, or of files and flags.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    recipes = [source for source in sources if source.endswith(".toml")]
    if len(sources) == 1 and model is None and not Path(sources[0]).suffix and not Path(sources[0]).exists():
        recipes = [*sources]  # the name of one; what is none is refused as such
    if recipes and len(sources) > 1:
        raise SlipstreamError(
            f"{recipes[0]} is a recipe, which names its data itself; given with it: "
            f"{counted(len(sources) - 1, 'other file')}.",
            reason=Reason.SPEC_INVALID,
            remedy="Give one recipe, or files alone.",
        )
    if recipes:
        spec = load_recipe(find_recipe(recipes[0]), overrides).spec
        target = spec.target if model is None else spec.target.model_copy(update={"model": model})
        return Wanted(target, spec.data, spec.drafter, spec.eval)
    table: dict[str, Any] = {"data": {"files": list(sources)}, "target": {"model": model} if model else {}}
    apply_overrides(table, [parse_override(override) for override in overrides])
    others = sorted(table.keys() - _Given.model_fields.keys())
    if others:
        raise SlipstreamError(
            f"Of files alone, only data.… and target.… can be set, not {others[0]}.",
            reason=Reason.SPEC_INVALID,
            remedy="Leave it out, or give a recipe.",
        )
    if isinstance(table.get("target", {}), dict) and not table.get("target", {}).get("model"):
        raise SlipstreamError(
            "Files alone do not say which tokenizer is meant.",
            reason=Reason.SPEC_INVALID,
            remedy="Name the target with --model: a directory, a hub name or a .gguf file.",
        )
    try:
        given = _Given.model_validate_json(json.dumps(table), strict=True)
    except ValidationError as error:
        problems = problems_of(error, {})
        raise SlipstreamError(
            "; ".join(text for _, text in problems) + ".", reason=Reason.SPEC_INVALID, remedy="Correct the --set flags."
        ) from error
    return Wanted(given.target, given.data)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SlipstreamError(
            f"The report {path} cannot be written: {error.strerror}.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Name a file in a writable directory with --report.",
        ) from error
