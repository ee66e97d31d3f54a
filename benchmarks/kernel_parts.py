"""Where the time of a step goes: GPU kernels of a torch.profiler trace, grouped by name."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

PARTS = (
    # The first group with a matching word takes the kernel, so attention templates come before product templates.
    ("attention", ("flex_attention", "fmha", "flash", "fused_sdpa")),
    ("products", ("gemm", "nvjet", "cutlass", "cublas", "wgmma", "xmma", "triton_tem", "splitk", "_mm_")),
    # A compiled kernel is named after its operations: only AdamW in one pass interpolates.
    ("optimizer", ("adam", "multi_tensor_apply", "lerp")),
)
REST = "rest"
TOP_KERNELS = 40


def part_of(kernel: str) -> str:
    """The group of a kernel's name."""
    lower = kernel.lower()
    return next((part for part, words in PARTS if any(word in lower for word in words)), REST)


def group(kernels: Iterable[tuple[str, float, int]], steps: int) -> dict[str, Any]:
    """Milliseconds per step by part, and the kernels that take most.

    Args:
        kernels: (name, microseconds in all, calls in all).
        steps: that were profiled.
    """
    parts = dict.fromkeys([part for part, _ in PARTS] + [REST], 0.0)
    longest = sorted(kernels, key=lambda kernel: -kernel[1])
    for name, microseconds, _ in longest:
        parts[part_of(name)] += microseconds / 1e3 / steps
    top = [
        {"kernel": name[:160], "part": part_of(name), "ms": us / 1e3 / steps, "calls": calls / steps}
        for name, us, calls in longest[:TOP_KERNELS]
    ]
    launches = sum(calls for _, _, calls in longest) / steps
    return {"ms_by_part": parts, "kernels_per_step": launches, "top_kernels": top}


def profile_steps(step: Callable[[], None], steps: int) -> dict[str, Any]:
    """Run `step` under the profiler; see `group`. For CUDA."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return group(kernels_of(profiler.key_averages()), steps)


def kernels_of(events: Iterable[Any]) -> list[tuple[str, float, int]]:
    """(name, microseconds, calls) of what ran on the device.

    Ranges that a library marks on the device's timeline hold kernels that are counted by themselves.
    """
    from torch.autograd import DeviceType

    return [
        (event.key, float(event.self_device_time_total), int(event.count))
        for event in events
        if event.device_type == DeviceType.CUDA
        and event.self_device_time_total > 0
        and not getattr(event, "is_user_annotation", False)
    ]
