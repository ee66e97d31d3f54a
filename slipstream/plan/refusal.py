"""Why a run does not fit on a device, or cannot run there: in the same words for who plans it and who creates it."""

from dataclasses import replace
from functools import lru_cache

from slipstream.errors import SlipstreamError
from slipstream.plan.gpus import Gpu, why_not_there
from slipstream.plan.memory import plan_memory
from slipstream.plan.search import Fit, nearest_fit, single_fits
from slipstream.plan.sizes import RunSizes
from slipstream.run_spec.reasons import Reason

_MIB = 1 << 20
_GIB = 1 << 30


def refusal(sizes: RunSizes, device: Gpu) -> SlipstreamError | None:
    """Why the run cannot run there, or OUT_OF_MEMORY with the nearest settings that fit; None where it fits."""
    needs = why_unfit(sizes, device)
    if needs is None:
        return None
    if why_not_there(sizes, device) is not None:
        return SlipstreamError(
            needs,
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy=f"Train on another GPU{_what_else(sizes, device)}.",
        )
    room = device.memory_bytes
    nearest, alone = nearest_fit(sizes, room, room), single_fits(sizes, room, room)
    larger = "a machine with more memory" if sizes.on_cpu else "a larger GPU"
    remedy = f"No settings that were tried fit: take {larger}, or a smaller target"
    if nearest is not None:
        remedy = f"Nearest settings that fit, with {gib(nearest.peak_bytes)}: {in_words(nearest)}"
        others = [in_words(fit) for fit in alone if fit.settings != nearest.settings]
        remedy += f". Enough alone: {'; '.join(others)}" if others else ""
    return SlipstreamError(needs, reason=Reason.OUT_OF_MEMORY, remedy=f"{remedy}.")


@lru_cache(maxsize=4096)  # a control plane asks this of every run that waits and every trainer, each second
def why_unfit(sizes: RunSizes, device: Gpu) -> str | None:
    """The first sentence of `refusal`, without a search for what would fit."""
    if (why := why_not_there(sizes, device)) is not None:
        return f"{device.name} cannot train this drafter: {why}."
    memory, room = plan_memory(sizes, device.memory_bytes), device.memory_bytes
    if memory.peak_bytes <= room:
        return None
    return f"The run needs {gib(memory.peak_bytes)} in the {memory.worst_phase}, {device.name} has {gib(room)}."


def can_run(sizes: RunSizes, device: Gpu) -> bool:
    """Whether `refusal` finds nothing against it."""
    return why_unfit(sizes, device) is None


def nearest_there(sizes: RunSizes, gpu: Gpu) -> Fit | None:
    """The nearest settings with which the run fits on such a card, without FP8 where it has none; None if none does."""
    if why_not_there(sizes, gpu) is None:
        return nearest_fit(sizes, gpu.memory_bytes, gpu.memory_bytes)
    in_bfloat16 = replace(sizes, fp8=False)
    if not sizes.fp8 or why_not_there(in_bfloat16, gpu) is not None:
        return None
    fit = nearest_fit(in_bfloat16, gpu.memory_bytes, gpu.memory_bytes)
    return fit and replace(fit, settings=("train.fp8=false", *fit.settings))


def _what_else(sizes: RunSizes, gpu: Gpu) -> str:
    """What to change besides, of a run that cannot run on such a card."""
    if (there := nearest_there(sizes, gpu)) is not None:
        return f", or change what it cannot do: {in_words(there)}"
    if why_not_there(replace(sizes, fp8=False), gpu) is not None:
        return ", or change what it cannot do: --set drafter.head_dim=128"
    return f": without FP8 the run does not fit into {gib(gpu.memory_bytes)}, whatever was tried"


def in_words(fit: Fit) -> str:
    """As a command line takes it."""
    return " ".join(f"--set {setting}" for setting in fit.settings)


def gib(size: float) -> str:
    """GiB with one decimal; MiB below one."""
    return f"{size / _GIB:,.1f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"
