"""The one device that an agent's training processes use, found without importing torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.child_processes import visible_gpu
from slipstream.errors import SlipstreamError
from slipstream.gpu_limits import Capability
from slipstream.machine_probe import TorchFacts, memory_bytes, probe_torch
from slipstream.run_spec.reasons import Reason


@dataclass(frozen=True)
class TrainerDevice:
    """A device as it is registered."""

    kind: str
    """`cpu` or `cuda`"""
    index: int = 0
    """Among the GPUs that this process may see."""
    name: str = ""
    memory_bytes: int | None = None
    """Of the GPU; of a CPU, of this machine or its container."""
    compute_capability: Capability | None = None
    """Of a GPU."""
    host_memory_bytes: int | None = None
    """Beside a GPU: where a run trains that asks for the CPU."""

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.kind == "cuda"

    def environment(self, own: Mapping[str, str] = os.environ) -> dict[str, str]:
        """What makes a training process see this device alone."""
        if not self.is_cuda:
            return {"CUDA_VISIBLE_DEVICES": ""}
        return {"CUDA_VISIBLE_DEVICES": visible_gpu(self.index, own)}

    def as_json(self) -> dict[str, Any]:
        """For the registration."""
        facts = {"kind": self.kind, "index": self.index, "name": self.name[:255], "memory_bytes": self.memory_bytes}
        if self.is_cuda:
            facts |= {"compute_capability": self.compute_capability, "host_memory_bytes": self.host_memory_bytes}
        return facts


def find_device(choice: str) -> TrainerDevice:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` names; a GPU is looked for in a process of its own.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED, there is no such device; SPEC_INVALID, it is none of these.
    """
    kind, _, number = choice.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and (kind != "cuda" or not number.isdecimal())):
        raise SlipstreamError(
            f"--device is {choice!r}.", reason=Reason.SPEC_INVALID, remedy="Give auto, cpu, cuda or cuda:N."
        )
    return _cpu() if kind == "cpu" else choose_device(kind, int(number or 0), probe_torch())


def choose_device(kind: str, index: int, facts: TorchFacts) -> TrainerDevice:
    """Of what torch sees; raises as `find_device`."""
    if index < len(facts.gpus):
        gpu = facts.gpus[index]
        return TrainerDevice("cuda", index, gpu.name, gpu.memory_bytes, gpu.compute_capability, memory_bytes()[0])
    if kind == "auto" and facts.problem is None:
        return _cpu()
    raise SlipstreamError(
        facts.problem or f"torch sees {len(facts.gpus)} GPUs, none with the number {index}.",
        reason=Reason.ENVIRONMENT_UNSUPPORTED,
        remedy="Run `slipstream doctor`; or train on the CPU: --device cpu",
    )


def _cpu() -> TrainerDevice:
    return TrainerDevice("cpu", memory_bytes=memory_bytes()[0])
