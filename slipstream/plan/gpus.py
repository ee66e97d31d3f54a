"""Devices to plan for: what a trainer cannot do on them, and how fast it is assumed to be."""

import math
from dataclasses import dataclass

from slipstream.counted import counted
from slipstream.gpu_limits import FIRST_WITH_FP8, LEAST_CAPABILITY, Capability, gpu_limits
from slipstream.machine_probe import memory_bytes, usable_cores
from slipstream.plan.memory import GIB
from slipstream.plan.sizes import RunSizes


@dataclass(frozen=True)
class Gpu:
    """A card; a CPU is described in the same way."""

    name: str
    memory_bytes: int
    """As the driver reports it, about."""
    peak_tflops: float
    """Data sheet: bfloat16, dense, float32 sums."""
    capability: Capability | None = None
    """Compute capability; None where only the memory is known, and of a CPU."""
    as_fast_as: str | None = None
    """A known card whose speed is taken, where only the memory is known."""


GPUS = (
    Gpu("L4", round(22.0 * GIB), 121.0, (8, 9)),
    Gpu("RTX 4090", round(23.5 * GIB), 165.0, (8, 9)),
    Gpu("RTX 5090", round(31.4 * GIB), 209.0, (12, 0)),
    Gpu("A100 40GB", round(39.4 * GIB), 312.0, (8, 0)),
    Gpu("L40S", round(44.4 * GIB), 362.0, (8, 9)),
    Gpu("A100 80GB", round(79.2 * GIB), 312.0, (8, 0)),
    Gpu("H100", round(79.2 * GIB), 989.0, (9, 0)),
    Gpu("RTX PRO 6000", round(94.9 * GIB), 503.0, (12, 0)),
    Gpu("H200", round(139.8 * GIB), 989.0, (9, 0)),
    Gpu("B200", round(178.3 * GIB), 2250.0, (10, 0)),
)
H200 = next(gpu for gpu in GPUS if gpu.name == "H200")

# Measured on an H200, nominal work per second as a share of the data sheet's peak: hidden size 576 and 4096.
_SMALL, _LARGE = (576, 0.18), (4096, 0.55)
_SMALL_RECORDED = 0.29
"""The smaller one with CUDA graphs."""
_FP8_GAIN = 1.33
"""139.6 ms a step in bfloat16, 104.7 in FP8, at hidden size 4096."""

TFLOPS_OF_A_CORE = 0.05
"""Nominal work of the demo's step, 0.24 s on two idle cores (AVX2, float32)."""


def this_gpu(name: str, size: int, capability: Capability) -> Gpu:
    """A card that is there, by what torch says of it; as fast as the known one of that name, or as an H200."""
    return Gpu(name, size, (gpu_named(name) or H200).peak_tflops, capability)


def this_cpu(size: int | None = None) -> Gpu:
    """This machine's processor, with its memory or so much."""
    cores = usable_cores()
    return Gpu(f"a CPU with {counted(cores, 'core')}", size or memory_bytes()[0], cores * TFLOPS_OF_A_CORE)


def gpu_named(name: str) -> Gpu | None:
    """The card that torch calls so: "NVIDIA H100 80GB HBM3" is an H100."""
    words = set(name.replace("-", " ").split())
    return next((gpu for gpu in reversed(GPUS) if set(gpu.name.split()) <= words), None)


def why_not_there(sizes: RunSizes, gpu: Gpu) -> str | None:
    """Why a trainer would refuse the run on such a card, whatever its memory; None if nothing is known against it."""
    if sizes.on_cpu:
        return None
    if refusal := gpu_limits(gpu.capability or LEAST_CAPABILITY, None, None).head_dim_refusal(sizes.head_dim):
        return refusal
    if sizes.fp8 and gpu.capability is not None and gpu.capability < FIRST_WITH_FP8:
        found, first = (".".join(map(str, capability)) for capability in (gpu.capability, FIRST_WITH_FP8))
        return f"train.fp8 is true, but compute capability {found} has no FP8 products; they begin with {first}"
    return None


def assumed_share(sizes: RunSizes) -> float:
    """Of a card's peak that a trainer reaches: between the two sizes that were measured, by the logarithm."""
    (small, low), (large, high) = _SMALL, _LARGE
    low = _SMALL_RECORDED if sizes.cuda_graphs else low
    position = math.log(sizes.hidden_size / small) / math.log(large / small)
    return low + (high - low) * min(1.0, max(0.0, position))


def assumed_tflops(sizes: RunSizes, gpu: Gpu) -> float:
    """TFLOP/s of nominal work. A CPU's peak is what its cores are assumed to reach."""
    if sizes.on_cpu:
        return gpu.peak_tflops
    return gpu.peak_tflops * assumed_share(sizes) * (_FP8_GAIN if sizes.fp8 else 1.0)
