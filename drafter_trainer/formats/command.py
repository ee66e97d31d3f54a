"""`drafter-trainer export` and `import`: drafters out to engines, and back.

torch is imported once the arguments are understood.
"""

import argparse
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from drafter_trainer.evaluation.command import open_checkpoint
from slipstream.checkpoint_name import find_checkpoint
from slipstream.child_processes import sigterm_as_exit
from slipstream.drafter_name import drafter_name, find_drafter
from slipstream.errors import SlipstreamError
from slipstream.flag_values import THREADS
from slipstream.hub_drafter import HubDrafter
from slipstream.packaged_model import target_here
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.telemetry.logs import log_event

if TYPE_CHECKING:
    from drafter_trainer.formats.drafter_format import PublishedDrafter

FORMAT_NAMES = ("vllm", "sglang", "zlab")
DTYPES = ("float32", "bfloat16", "float16")
THREADS_HELP = "CPU threads; default: one, which a busy CPU slows least (with --device cuda: torch's own choice)"

_log = logging.getLogger(__name__)


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `export`."""
    parser.add_argument(
        "checkpoint",
        metavar="RUN[@STEP]",
        help="a run's name or directory; default: its newest checkpoint, @best the best one; or the directory of "
        "a checkpoint",
    )
    parser.add_argument("--to", required=True, choices=FORMAT_NAMES, help="whose layout to write")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="directory to make")
    parser.add_argument("--dtype", choices=DTYPES, help="of the tensors; default: the target's in the run definition")
    parser.add_argument("--target-model", metavar="MODEL", help="to decode with; default: the run's target.model")
    parser.add_argument(
        "--target-name",
        type=_one_line,
        metavar="NAME",
        help="how servers will know the target; default: the run's target.model",
    )
    parser.add_argument("--eval", dest="evaluation", type=Path, metavar="FILE", help="report for the model card")
    parser.add_argument(
        "--device", type=_device, default="cpu", metavar="NAME", help="where to decode: cpu (default), cuda"
    )
    parser.add_argument("--threads", type=THREADS, metavar="N", help=THREADS_HELP)
    parser.add_argument(
        "--without-self-test", action="store_true", help="do not decode with the files; the model card says so"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier export")


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `import`."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="config.json and safetensors in any of the formats; or OWNER/NAME[@REVISION], a drafter of a hub",
    )
    # Also understood as --target, the beginning of its name, as it was called once.
    parser.add_argument("--target-model", required=True, metavar="MODEL", help="the drafter's target, to decode with")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the target; default: float32")
    parser.add_argument(
        "--device", type=_device, default="cpu", metavar="NAME", help="where to decode: cpu (default), cuda"
    )
    parser.add_argument("--threads", type=THREADS, metavar="N", help=THREADS_HELP)


def run_export(args: argparse.Namespace) -> int:
    """Export. SIGTERM ends it in order, with status 143.

    Raises:
        SlipstreamError: see `export`; SPEC_INVALID, flags that do not go together.
    """
    if args.without_self_test and args.target_model:
        raise SlipstreamError(
            "--without-self-test and --target-model are both given: the target is there to decode with",
            reason=Reason.SPEC_INVALID,
            remedy="Leave one of them out.",
        )
    checkpoint, spec, _ = open_checkpoint(find_checkpoint(args.checkpoint))
    # torch takes seconds to import, the rest minutes: whoever waits is told what for.
    log_event(_log, "info", "exporting", checkpoint=str(checkpoint), to=args.to, output=str(args.output))
    with sigterm_as_exit():
        _limit_threads(args.threads, args.device)
        from drafter_trainer.formats.export import ExportPlan, export

        export(
            ExportPlan(
                checkpoint=checkpoint,
                spec=spec,
                format_name=args.to,
                output=args.output,
                dtype=args.dtype or spec.target.dtype,
                target=None if args.without_self_test else decoding_target(args.target_model, spec.target),
                served_as=args.target_name,
                device=args.device,
                replace=args.force,
                evaluation=args.evaluation,
            )
        )
    sys.stdout.write(f"{args.output}\n")
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Read a drafter, decode with it, and say what a recipe needs to go on from it.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, TARGET_INCOMPATIBLE, MODEL_INVALID.
    """
    directory = find_drafter(args.directory)
    named = drafter_name(args.directory, Path())
    # A branch moves on; the cache keeps a commit below its own name.
    named = replace(named, revision=directory.name) if isinstance(named, HubDrafter) else directory.absolute()
    with sigterm_as_exit():
        _limit_threads(args.threads, args.device)
        from drafter_trainer.formats.importing import open_with_target

        target = target_here(TargetSpec(model=args.target_model, dtype=args.dtype), sys.stderr.write)
        drafter, found = open_with_target(directory, target, args.device)
    sys.stdout.write(_recipe_lines(str(named), drafter))
    sys.stdout.write(
        f"# {drafter.format_name}; accepted length {found.accepted_length:.3f}, bonus included, on "
        f"{found.prompts} plain prompts\n"
    )
    return 0


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no device, expected cpu, cuda or cuda:N")
    return text


def _one_line(text: str) -> str:
    """It becomes a line of the model card's head."""
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no name, expected one line of printable characters")
    return text


def _limit_threads(count: int | None, device: str) -> None:
    """Decoding one token at a time leaves a second thread little to do, and waits for it wherever the CPU is busy."""
    import torch

    if count is not None or device == "cpu":
        torch.set_num_threads(count or 1)


def decoding_target(given: str | None, trained: TargetSpec) -> TargetSpec:
    """The target that an export decodes with: a flag's model, else the run's."""
    # A revision belongs to the name it was given with.
    other = {} if given in (None, trained.model) else {"model": given, "revision": None}
    return target_here(trained.model_copy(update=other), sys.stderr.write)


def _recipe_lines(init_from: str, drafter: "PublishedDrafter") -> str:
    """The table `[drafter]` of a recipe that begins with this drafter."""
    import json

    from drafter_trainer.formats.first_weights import recipe_settings

    lines = [f"{key} = {json.dumps(value)}" for key, value in recipe_settings(drafter.config).items()]
    return "\n".join(["[drafter]", f"init_from = {json.dumps(init_from)}", *lines]) + "\n"
