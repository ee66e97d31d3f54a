"""Makes sure that attention on this process's GPU is compiled and right: once, before a trainer builds anything there,
and in `drafter-trainer doctor`, which is why both see the same."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from drafter_trainer.compile_cache import use_compile_cache
from drafter_trainer.device_failures import Phase, failures_reported, unknown_torch
from slipstream.machine_probe import package_version

if TYPE_CHECKING:
    from drafter_trainer.flex_policy import CompilerGuards


@dataclass(frozen=True)
class GuardedAttention:
    """What was found."""

    guards: "CompilerGuards"
    cache: Path | None
    """The folder of the shared compile cache, if it is used."""
    seconds: float
    """Of the self-test, its compilation included."""


def guard_attention(device: torch.device, *, shares_cache: bool) -> GuardedAttention:
    """Check the environment, refuse uncompiled calls from now on, and try the kernel, on the first GPU.

    Args:
        device: of type cuda.
        shares_cache: what is compiled goes to the cache that trainers share; else where torch keeps it.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED; OUT_OF_MEMORY, other programs have the GPU; what `use_compile_cache`
            raises.
    """
    # Here, because it loads the compiler, which a CPU run has no use for and waits two seconds for.
    try:
        from drafter_trainer.flex_policy import check_environment, configure_compiler, install_tripwire, self_test
    except (ImportError, AttributeError) as error:
        raise unknown_torch(error) from error

    guards = check_environment(device)
    device = torch.device("cuda", 0)
    with failures_reported(Phase.SELF_TEST):
        torch.cuda.set_device(device)
        cache = use_compile_cache(os.environ, built_for=compiler_and_device(device)) if shares_cache else None
        configure_compiler()
        install_tripwire()
        began = time.monotonic()
        self_test(device)
        return GuardedAttention(guards, cache, time.monotonic() - began)


def compiler_and_device(device: torch.device) -> tuple[str, str, str]:
    """Code that was compiled with the one for the other serves nobody else."""
    triton = package_version("triton")
    return f"torch-{torch.__version__}", f"triton-{triton}", torch.cuda.get_device_name(device)
