"""`drafter-trainer eval`: measure a checkpoint's drafter by decoding with it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

if TYPE_CHECKING:
    from drafter_trainer.drafter import DFlashDrafter
    from drafter_trainer.drafter_config import DrafterConfig
    from slipstream.run_spec.spec import RunSpec
    from slipstream.target_loading import LoadedTarget
    from slipstream.wire.target_config import TargetConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command; what is left out comes from the run definition in the checkpoint."""
    parser.add_argument(
        "checkpoint", type=Path, help="checkpoint directory, or a run directory (its latest checkpoint)"
    )
    parser.add_argument("--target-model", help="directory, hub name or .gguf of the target; default: the run's")
    parser.add_argument("--prompts", type=Path, help="JSONL with one prompt a line; default: the run's eval.prompts")
    parser.add_argument("--num-prompts", type=int, help="first so many prompts of every source; default: the run's")
    parser.add_argument("--max-new-tokens", type=int, help="per prompt; default: the run's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the run's eval.dtype")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads; default: all cores")
    parser.add_argument("--compare-untrained", action="store_true", help="also decode with the drafter's first weights")
    parser.add_argument("--output", type=Path, help="write the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the table.

    Raises:
        SlipstreamError: NOT_LOSSLESS when an output differs from plain decoding by more than rounding; anything that
            loading the checkpoint, the target or the prompts raises.
    """
    import sys

    import torch
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeRemainingColumn

    from drafter_trainer.evaluation.compare import Evaluator
    from drafter_trainer.evaluation.prompts import load_prompts
    from drafter_trainer.evaluation.report import print_report, to_dict, write_report
    from slipstream.run_spec.spec import TargetSpec
    from slipstream.target_loading import load_causal_lm

    if args.threads:
        torch.set_num_threads(args.threads)
    directory, spec = open_checkpoint(args.checkpoint)
    dtype = args.dtype or spec.eval.dtype
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    prompts = load_prompts(_prompts_path(args, spec), args.num_prompts or spec.eval.num_prompts)
    target_spec = TargetSpec.model_validate(
        {**spec.target.model_dump(), "dtype": dtype, **({"model": args.target_model} if args.target_model else {})}
    )
    target = load_causal_lm(target_spec, device)
    drafters = load_drafters(directory, spec, target, untrained=args.compare_untrained)
    max_new_tokens = args.max_new_tokens or spec.eval.max_new_tokens
    gap_bound = 0.0 if dtype == "float32" else spec.eval.bfloat16_gap_bound
    evaluator = Evaluator(target, drafters, max_new_tokens, gap_bound)
    columns = (*Progress.get_default_columns()[:-1], TextColumn("ETA"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("decoding prompts", total=len(prompts))
        comparison = evaluator.run(prompts, lambda done: progress.update(task, completed=done))
    settings = {
        "checkpoint": directory.name,
        "run": spec.name,
        "target": target_spec.model,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "dtype": dtype,
        "attention": target.model.config._attn_implementation,
        "max_new_tokens": max_new_tokens,
        "gap_bound": gap_bound,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    report = to_dict(comparison, settings)
    if args.output:
        write_report(args.output, report)
    print_report(report, Console(file=sys.stdout))
    if not comparison.lossless:
        raise SlipstreamError(
            "speculative output differs from plain greedy decoding by more than rounding explains (see above)",
            reason=Reason.NOT_LOSSLESS,
            remedy="This is a defect of decoding or of the target's cache: please report it with the table.",
        )
    return 0


def open_checkpoint(path: Path) -> "tuple[Path, RunSpec]":
    """The checkpoint directory that `path` means, and the run definition it was trained with.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, there is none or it is damaged.
    """
    from drafter_trainer.checkpoint import newest_checkpoint, read_state
    from slipstream.run_spec.spec import RunSpec

    directory = newest_checkpoint(path / "checkpoints") if (path / "checkpoints").is_dir() else path
    if directory is None or not directory.is_dir():
        raise SlipstreamError(
            f"{path} holds no checkpoint",
            reason=Reason.CHECKPOINT_INVALID,
            remedy="Name a run directory with checkpoints/, or one step-… directory in it.",
        )
    return directory, RunSpec.model_validate(read_state(directory).spec)


def load_drafters(
    directory: Path, spec: "RunSpec", target: "LoadedTarget", *, untrained: bool
) -> "dict[str, DFlashDrafter]":
    """The checkpoint's drafter in the target's dtype and device, and before it, if asked, its first weights.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID; TARGET_INCOMPATIBLE, the target is not the one it was trained for.
    """
    from drafter_trainer.checkpoint import load_drafter_weights
    from drafter_trainer.drafter import DFlashDrafter, initialise_weights
    from drafter_trainer.drafter_config import DrafterConfig
    from slipstream.target_facts import read_frozen_weights, read_target_facts

    text, weights = load_drafter_weights(directory)
    config = DrafterConfig.from_json(text)
    target_config = read_target_facts(target.model, target.tokenizer).config
    check_fits(config, target_config)
    drafters = {}
    if untrained:
        first = DFlashDrafter(config)
        final_norm = read_frozen_weights(target.model, target_config)["norm.weight"]
        initialise_weights(first, spec.train.seed, final_norm.float())
        drafters["untrained"] = first
    trained = DFlashDrafter(config)
    trained.load_state_dict(weights)
    drafters["trained"] = trained
    return {name: drafter.to(target.model.device, target.model.dtype).eval() for name, drafter in drafters.items()}


def check_fits(config: "DrafterConfig", target: "TargetConfig") -> None:
    """Compare the sizes of drafter and target.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE, with what was found and expected.
    """
    pairs = {
        "vocabulary rows": (target.vocab_size, config.vocab_size),
        "hidden size": (target.hidden_size, config.hidden_size),
        "layers": (target.num_layers, config.num_target_layers),
        "model type": (target.model_type, config.target_model_type),
    }
    wrong = [f"{name} {found} (expected {expected})" for name, (found, expected) in pairs.items() if found != expected]
    if wrong:
        raise SlipstreamError(
            f"the target does not fit the drafter: {', '.join(wrong)}",
            reason=Reason.TARGET_INCOMPATIBLE,
            remedy="Give the target that the drafter was trained for with --target-model.",
        )


def _prompts_path(args: argparse.Namespace, spec: "RunSpec") -> Path:
    if args.prompts:
        return Path(args.prompts)
    if spec.eval.prompts:
        return Path(spec.eval.prompts)
    raise SlipstreamError(
        "there are no prompts: the run has no eval.prompts",
        reason=Reason.SPEC_INVALID,
        remedy="Give --prompts FILE.",
    )
