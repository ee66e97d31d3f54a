"""`slipstream plan RECIPE`: what a run will need of memory, time, wire and disk, before anything starts."""

import argparse
import re
import sys
from typing import TYPE_CHECKING

from slipstream.flag_values import within

if TYPE_CHECKING:
    from slipstream.epoch_length import EpochLength
    from slipstream.plan.gpus import Gpu
    from slipstream.run_spec.load import LoadedSpec

_LEAST_MEMORY, _LARGEST_MEMORY = 1 << 26, 1 << 50
_SLOWEST, _FASTEST = 1e-3, 1e6
_UNITS = {"": 1, "mib": 1 << 20, "gib": 1 << 30, "mb": 10**6, "gb": 10**9}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "plan",
        help="what a run will need of memory, time, wire and disk, before anything starts",
        description="Predicts each phase of a step, what fits on which GPU, and time, wire and disk. A run that does "
        "not fit is refused with the nearest settings that do; exit status 6. One that the card cannot run at all: 4. "
        "Loads neither torch nor the model.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a .toml file, or the name of a recipe that ships")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override; a later one wins")
    parser.add_argument(
        "--target-config",
        metavar="FILE|DIR|NUMBERS",
        help="the target's config.json, .gguf file or directory, or hidden_size=…,num_layers=…; default: target.model",
    )
    parser.add_argument(
        "--memory",
        type=parse_memory,
        metavar="SIZE",
        help="of the GPU (for a recipe that trains on a CPU: of the host), 24GiB; default: this machine's",
    )
    parser.add_argument(
        "--epoch-packs",
        type=within(int, 1, 1_000_000_000_000, "number of packs"),
        metavar="N",
        help="packs of one epoch, where train.epochs decides and the data is not on this machine; default: counted",
    )
    parser.add_argument("--tflops", type=parse_tflops, metavar="N", help="that the trainer achieves; default: assumed")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")


def parse_memory(text: str) -> int:
    """Bytes, plain or with a unit: `24GiB`, `80 GB`, `512MiB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(mib|gib|mb|gb|)", text.strip().lower())
    size = float(match.group(1)) * _UNITS[match.group(2)] if match else 0.0
    if not _LEAST_MEMORY <= size <= _LARGEST_MEMORY:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory; write 24GiB or 80GB")
    return int(size)


def parse_tflops(text: str) -> float:
    """TFLOP/s, as a trainer can have them."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not _SLOWEST <= value <= _FASTEST:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {_SLOWEST:g} to {_FASTEST:.0f}")
    return value


def run(args: argparse.Namespace) -> int:
    """Plan, print, and refuse what does not fit.

    Raises:
        SlipstreamError: SPEC_INVALID, MODEL_INVALID, DATA_INVALID; OUT_OF_MEMORY, with the nearest settings that fit;
            ENVIRONMENT_UNSUPPORTED, the card cannot run it whatever its memory.
    """
    # pydantic costs a tenth of a second: not for `--help`.
    import recipes
    from slipstream.cli.display import print_json
    from slipstream.cli.plan_view import print_plan
    from slipstream.epoch_length import EpochLength
    from slipstream.first_drafter import what_is_not_here
    from slipstream.mask_token import require_mask
    from slipstream.packaged_model import packaged_copy
    from slipstream.plan.gpus import this_cpu
    from slipstream.plan.refusal import refusal
    from slipstream.plan.report import as_json, plan_run
    from slipstream.plan.target_sizes import target_sizes
    from slipstream.run_spec.load import load_recipe

    loaded = load_recipe(recipes.find_recipe(args.recipe), args.set)
    spec = loaded.spec
    require_mask(spec)
    if (missing := what_is_not_here(spec.drafter.init_from)) is not None:
        print(f"{missing}; the plan does not need it", file=sys.stderr)
    target = target_sizes(spec.target, args.target_config or packaged_copy(spec.target))
    on_cpu = spec.train.attention == "sdpa"
    card, is_limit = (this_cpu(args.memory), True) if on_cpu else card_of(args.memory)
    length = _length_of(loaded, args.epoch_packs)
    data_packs = length.packs if isinstance(length, EpochLength) else None
    plan = plan_run(spec, target, card, args.tflops, data_packs)
    if args.output == "json":
        data = length.model_dump() if isinstance(length, EpochLength) else None
        print_json({"name": spec.name, "assumed_card": not is_limit, **as_json(plan), "data": data})
    else:
        print_plan(spec, plan, length, assumed_card=not is_limit, assumed_speed=args.tflops is None)
    if is_limit and (why := refusal(plan.sizes, card)) is not None:
        raise why
    return 0


def _length_of(loaded: "LoadedSpec", epoch_packs: int | None) -> "EpochLength | str | None":
    """What the epochs come to, or why it is not known; None where the recipe counts none."""
    from slipstream.cli.epoch_count import count_epochs
    from slipstream.epoch_length import EpochLength

    epochs = loaded.spec.train.epochs
    if epochs is None:
        return None
    if epoch_packs is not None:
        return EpochLength(epochs=epochs, packs=epochs * epoch_packs, exact=False, source="as --epoch-packs says")
    return count_epochs(loaded)


def card_of(memory_bytes: int | None) -> "tuple[Gpu, bool]":
    """The card to plan for; False: none was given and this machine has none, so that nothing is refused."""
    from slipstream.machine_probe import driver_version, probe_torch
    from slipstream.plan.gpus import GPUS, H200, Gpu, this_gpu

    if memory_bytes is not None:
        # As fast as the smallest known card that has so much.
        like = next((gpu for gpu in sorted(GPUS, key=_size) if gpu.memory_bytes >= 0.9 * memory_bytes), GPUS[-1])
        return Gpu("a GPU of this size", memory_bytes, like.peak_tflops, as_fast_as=like.name), True
    gpus = probe_torch().gpus if driver_version() is not None else ()
    if not gpus:
        return H200, False
    return this_gpu(gpus[0].name, gpus[0].memory_bytes, gpus[0].compute_capability), True


def _size(gpu: "Gpu") -> int:
    return gpu.memory_bytes
