"""What `slipstream plan` refuses is refused at a run's creation, too, as far as files and devices are known there."""

from collections.abc import Iterable, Mapping
from typing import Any

from slipstream.plan.gpus import Gpu, gpu_named
from slipstream.plan.refusal import can_run, refusal
from slipstream.plan.report import sizes_of_run
from slipstream.plan.sizes import RunSizes
from slipstream.plan.target_sizes import sizes_at_hand
from slipstream.run_spec.architectures import DFLASH
from slipstream.run_spec.spec import RunSpec

Device = tuple[str, Mapping[str, Any]]
"""The trainer's name, and its device as the trainer has registered it."""


def known_sizes(spec: RunSpec) -> RunSizes | None:
    """The sizes of the run; None where the target is not on this machine, or another package brings the drafter.

    Raises:
        SlipstreamError: SPEC_INVALID, TARGET_INCOMPATIBLE, settings that the target cannot have; DATA_INVALID,
            TARGET_FINGERPRINT_MISMATCH, held-out answers of no use.
    """
    target = sizes_at_hand(spec.target) if spec.drafter.architecture == DFLASH else None
    return None if target is None else sizes_of_run(spec, target)[0]


def require_fit(sizes: RunSizes, devices: Iterable[Device]) -> None:
    """Refuse a run that cannot be trained on any of the devices; one whose memory is not known may do.

    Raises:
        SlipstreamError: OUT_OF_MEMORY, ENVIRONMENT_UNSUPPORTED, as `slipstream plan` does for the largest of them.
    """
    kind = "cpu" if sizes.on_cpu else "cuda"
    found = [_described(trainer, device) for trainer, device in devices if device["kind"] == kind]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return
    largest = max(known, key=lambda one: one.memory_bytes)
    if not any(can_run(sizes, one) for one in known) and (why := refusal(sizes, largest)) is not None:
        raise why


def _described(trainer: str, device: Mapping[str, Any]) -> Gpu | None:
    memory = device.get("memory_bytes")
    if not memory:
        return None
    if device["kind"] == "cpu":
        return Gpu(f"the CPU of trainer {trainer}", memory, 0.0)
    like = gpu_named(device.get("name", ""))
    name = f"{device.get('name') or 'the GPU'} of trainer {trainer}"
    return Gpu(name, memory, 0.0, like.capability if like is not None else None)
