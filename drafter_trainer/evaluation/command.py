"""`drafter-trainer eval`: measure a checkpoint's drafter by decoding with it."""

import argparse
import logging
import math
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from drafter_trainer.checkpoint_state import newest_checkpoint, read_state
from drafter_trainer.evaluation.decoding_progress import DecodingProgress, decoding_progress
from drafter_trainer.evaluation.setting import DecodingPlan, Setting
from drafter_trainer.formats.published_run import is_published, run_of_published
from slipstream.checkpoint_name import MANIFEST
from slipstream.child_processes import sigterm_as_exit
from slipstream.disk import require_place
from slipstream.drafter_name import find_drafter
from slipstream.errors import SlipstreamError
from slipstream.eval_prompts import Prompt, load_prompts
from slipstream.flag_values import THREADS, TOKENS, within
from slipstream.packaged_model import target_here
from slipstream.run_spec.architectures import remedy_where_missing
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from slipstream.telemetry.logs import log_event

TEXT, JSON = "text", "json"
_PROMPTS = within(int, 1, 1_000_000_000, "number of prompts")

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command; what is left out comes from the run definition in the checkpoint."""
    parser.add_argument(
        "checkpoint",
        metavar="RUN[@STEP]",
        help="a run's name or directory; default: its newest checkpoint, @best the best one; or the directory of a "
        "checkpoint, or of an exported or published drafter; or OWNER/NAME[@REVISION], a drafter of a hub",
    )
    parser.add_argument(
        "--target-model", metavar="MODEL", help="directory, hub name or .gguf of the target; default: the run's"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSONL with one prompt a line; default: the run's eval.prompts"
    )
    parser.add_argument(
        "--num-prompts", type=_PROMPTS, metavar="N", help="first so many prompts of every source; default: the run's"
    )
    parser.add_argument("--max-new-tokens", type=TOKENS, metavar="N", help="per prompt; default: the run's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the run's eval.dtype")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--threads",
        type=THREADS,
        metavar="N",
        help="CPU threads of all processes together; default: one for each process, which a busy CPU slows least "
        "(over caches of fixed size, as for batches, and on a GPU: torch's own choice)",
    )
    parser.add_argument(
        "--jobs",
        type=within(int, 1, 4096, "number of processes"),
        metavar="N",
        default=1,
        help="prompts decoded at once, each in a process of its own; not over caches of fixed size (default: 1)",
    )
    parser.add_argument("--compare-untrained", action="store_true", help="also decode with the drafter's first weights")
    parser.add_argument(
        "--allow-other-target", action="store_true", help="measure the drafter on a target it was not trained for"
    )
    parser.add_argument(
        "--batch-sizes", type=_positives, default=(1,), metavar="N,…", help="prompts decoded at once (default: 1)"
    )
    parser.add_argument(
        "--temperatures", type=_temperatures, default=(0.0,), metavar="T,…", help="0 is greedy (default: 0)"
    )
    _add_loop(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=_output,
        default=TEXT,
        metavar="json|FILE",
        help="json: print the report as JSON in place of the table; FILE: write it there as well",
    )
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="write eval.json, eval.md and eval.html with plots and samples"
    )


def _add_loop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="rounds as CUDA graphs over caches of fixed size (default: on a GPU)",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compile the target's layers and the drafter; takes a minute, pays for many prompts (default: no)",
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the table. SIGTERM ends it in order, with status 143.

    Raises:
        SlipstreamError: NOT_LOSSLESS when an output differs from plain decoding by more than rounding;
            TARGET_INCOMPATIBLE when the target is not the run's; anything that loading the checkpoint, the target or
            the prompts raises.
    """
    with sigterm_as_exit():
        report = measure(args)

    from drafter_trainer.evaluation.report import as_json, write_text
    from drafter_trainer.evaluation.report_pages import write_pages
    from drafter_trainer.evaluation.report_table import print_report, report_console

    # What is printed first: it must not be lost where the file cannot be written.
    if args.output == JSON:
        sys.stdout.write(as_json(report))
    else:
        print_report(report, report_console())
    if isinstance(args.output, Path):
        write_text(args.output, as_json(report))
    if args.report:
        write_pages(args.report, report)
    if not report["lossless"]:
        raise SlipstreamError(
            "speculative output differs from plain greedy decoding by more than rounding explains (see above)",
            reason=Reason.NOT_LOSSLESS,
            remedy="This is a defect of decoding or of the target's cache: please report it with the table.",
        )
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Decode all prompts; returns the report."""
    # What may be refused at once comes before torch, whose import takes many seconds.
    if isinstance(args.output, Path):
        require_place(args.output, flag="--output")
    if args.report:
        require_place(args.report, flag="--report", directory=True)
    opened = open_drafter_directory(find_drafter(args.checkpoint), args.target_model)
    spec = opened[1]
    prompts = load_prompts(_prompts_path(args, spec), args.num_prompts or spec.eval.num_prompts)
    with decoding_progress(len(prompts) * len(args.batch_sizes) * len(args.temperatures)) as progress:
        return _decode(args, opened, prompts, progress)


def _decode(
    args: argparse.Namespace,
    opened: tuple[Path, RunSpec, str | None],
    prompts: list[Prompt],
    progress: DecodingProgress,
) -> dict[str, Any]:
    import torch

    from drafter_trainer.evaluation.compare import compare
    from drafter_trainer.evaluation.prompt_decoder import decode_prompts
    from drafter_trainer.evaluation.report import to_dict
    from drafter_trainer.evaluation.target_check import is_training_target
    from drafter_trainer.evaluation.whose_answers import unproven_answers

    directory, spec, fingerprint = opened
    plan = make_plan(args, directory, spec)
    jobs = 1 if plan.fixed_caches else args.jobs
    if jobs != args.jobs:
        log_event(_log, "info", "one process decodes: over fixed caches it is the batch that holds several prompts")
    verified = is_training_target(plan.target, spec.target, fingerprint, allow_other=args.allow_other_target)
    gap_bound = 0.0 if plan.target.dtype == "float32" else spec.eval.bfloat16_gap_bound
    with closing(decode_prompts(plan, prompts, jobs, progress.begin)) as decodings:
        comparisons = compare(progress.follow(decodings), plan.labels, gap_bound)
    settings = {
        # Not `best` or `latest`, which move on.
        "checkpoint": directory.resolve().name,
        "run": spec.name,
        "target": plan.target.model,
        "target_verified": verified,
        "unproven_answers": unproven_answers(spec, fingerprint, plan.target if verified else None),
        "device": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        "dtype": plan.target.dtype,
        "max_new_tokens": plan.max_new_tokens,
        "gap_bound": gap_bound,
        "torch": torch.__version__,
        "loop": plan.loop_in_words(),
        "processes": jobs,
        "threads_per_process": plan.threads,
    }
    return to_dict(comparisons, settings)


def make_plan(args: argparse.Namespace, directory: Path, spec: RunSpec) -> DecodingPlan:
    """Flags where given, else the run definition."""
    import torch

    settings = tuple(Setting(size, warmth) for warmth in args.temperatures for size in args.batch_sizes)
    changed = {"dtype": args.dtype or spec.eval.dtype}
    if args.target_model and args.target_model != spec.target.model:
        # A revision belongs to the name it was given with.
        changed |= {"model": args.target_model, "revision": None}
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    graphs = device == "cuda" if args.graphs is None else bool(args.graphs)
    if graphs and device != "cuda":
        raise SlipstreamError(
            f"--graphs needs a CUDA device, decoding runs on {device}",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Leave --graphs out, or decode with --device cuda.",
        )
    fixed_caches = graphs or args.compile or settings != (Setting(),)
    return DecodingPlan(
        checkpoint=directory,
        target=target_here(spec.target.model_copy(update=changed), sys.stderr.write),
        device=device,
        threads=_threads_of_a_process(
            args.threads, 1 if fixed_caches else args.jobs, one_row=device == "cpu" and not fixed_caches
        ),
        max_new_tokens=args.max_new_tokens or spec.eval.max_new_tokens,
        untrained_seed=spec.train.seed if args.compare_untrained else None,
        settings=settings,
        fixed_caches=fixed_caches,
        graphs=graphs,
        compiled=args.compile,
        sampling_seed=spec.train.seed,
        with_texts=args.report is not None,
    )


def _threads_of_a_process(given: int | None, processes: int, *, one_row: bool) -> int:
    """Where a CPU decodes one row, a second thread has little to do, and is waited for wherever the CPU is busy."""
    import torch

    if given is None:
        return 1 if one_row else torch.get_num_threads()
    return max(1, given // processes)


def open_drafter_directory(path: Path, target_model: str | None) -> tuple[Path, RunSpec, str | None]:
    """The same for a drafter in one of the formats too; the fingerprint is None where nothing says it.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID; SPEC_INVALID, nothing says what the target is.
    """
    if not is_published(path):
        return open_checkpoint(path)
    try:
        return path, *run_of_published(path, target_model)
    except ValidationError as error:
        raise _definition_invalid(path, error) from error


def open_checkpoint(path: Path) -> tuple[Path, RunSpec, str]:
    """The checkpoint directory that `path` means, the run definition it was trained with, its target's fingerprint.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, there is none, it is damaged, or its run definition is of another version.
    """
    directory = newest_checkpoint(path / "checkpoints") if (path / "checkpoints").is_dir() else path
    if directory is None or not any((directory / name).exists() for name in (MANIFEST, "state.json")):
        raise SlipstreamError(
            f"{path} holds no checkpoint",
            reason=Reason.CHECKPOINT_INVALID,
            remedy="Name a run directory with checkpoints/, or one step-… directory in it.",
        )
    state = read_state(directory)
    try:
        return directory, RunSpec.model_validate(state.spec), state.target_fingerprint
    except ValidationError as error:
        raise _definition_invalid(directory, error) from error


def _definition_invalid(directory: Path, error: ValidationError) -> SlipstreamError:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    return SlipstreamError(
        f"the run definition in checkpoint {directory} cannot be understood: {key}: {first['msg']}",
        reason=Reason.CHECKPOINT_INVALID,
        remedy=remedy_where_missing(error) or "It may come from another version of Slipstream; evaluate with that one.",
    )


def _prompts_path(args: argparse.Namespace, spec: RunSpec) -> Path:
    if args.prompts:
        return Path(args.prompts)
    if spec.eval.prompts:
        return Path(spec.eval.prompts)
    raise SlipstreamError(
        "there are no prompts: the run has no eval.prompts",
        reason=Reason.SPEC_INVALID,
        remedy="Give --prompts FILE.",
    )


def _output(text: str) -> str | Path:
    """text or json, as of other commands; all else is a file, if it looks like one."""
    if text in (TEXT, JSON):
        return text
    if "/" not in text and not Path(text).suffix:
        raise argparse.ArgumentTypeError(f"{text!r} is neither text, json nor a file such as eval.json or ./{text}")
    return Path(text)


def _positives(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive numbers such as 1,4")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        warmths = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        warmths = (math.nan,)
    if any(not math.isfinite(warmth) or warmth < 0 for warmth in warmths):
        raise argparse.ArgumentTypeError(f"{text}: a temperature is a finite number, 0 or larger")
    return warmths
