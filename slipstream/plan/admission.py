"""Which trainers can hold a run, by the plan's own numbers: asked when it is created, and when it is given to one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.plan.gpus import Gpu, gpu_named
from slipstream.plan.refusal import can_run, refusal
from slipstream.plan.report import sizes_of_run
from slipstream.plan.sizes import RunSizes, TargetSizes
from slipstream.plan.target_sizes import sizes_at_hand
from slipstream.run_spec.architectures import DFLASH
from slipstream.run_spec.device import resolve_device
from slipstream.run_spec.spec import RunSpec, TrainSpec

Devices = Sequence[Mapping[str, Any]]
"""Of one trainer, as it has registered them."""


def known_sizes(spec: RunSpec, served: TargetSizes | None = None, *, with_answers: bool = True) -> RunSizes | None:
    """The sizes of the run; None where they are not to be known, or another package brings the drafter.

    Args:
        spec: of the run.
        served: what its target server says of its model; None: what this machine's files say, if it has them.
        with_answers: count its held-out answers, where their file is on this machine.

    Raises:
        SlipstreamError: SPEC_INVALID, TARGET_INCOMPATIBLE, settings that the target cannot have; DATA_INVALID,
            TARGET_FINGERPRINT_MISMATCH, held-out answers of no use.
    """
    if spec.drafter.architecture != DFLASH:
        return None
    target = served or sizes_at_hand(spec.target)
    if target is None:
        return None
    return sizes_of_run(spec, target)[0] if with_answers else RunSizes.of(spec, target)


def places(train: TrainSpec, trainer: str, devices: Devices) -> list[Gpu | None]:
    """The devices of a trainer that the run may train on, None for one of unknown memory; empty where it has none.

    A run that asks for the CPU trains there on the host of a GPU, too.
    """
    try:
        wanted = resolve_device(train, any(one["kind"] == "cuda" for one in devices))
    except SlipstreamError:
        return []
    return [_described(trainer, one, wanted) for one in devices if wanted == "cpu" or one["kind"] == "cuda"]


def require_fit(sizes: RunSizes, train: TrainSpec, trainers: Iterable[tuple[str, Devices]]) -> None:
    """Refuse a run that none of the trainers can hold; one whose memory is not known may do.

    Args:
        sizes: of the run.
        train: of the run.
        trainers: name and devices of each.

    Raises:
        SlipstreamError: OUT_OF_MEMORY, ENVIRONMENT_UNSUPPORTED, as `slipstream plan` does for the largest of them.
    """
    found = [place for name, devices in trainers for place in places(train, name, devices)]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found) or any(can_run(sizes, one) for one in known):
        return
    if (why := refusal(sizes, largest(known))) is not None:
        raise why


def largest(found: Iterable[Gpu]) -> Gpu:
    """The one that could hold most."""
    return max(found, key=lambda one: one.memory_bytes)


def _described(trainer: str, device: Mapping[str, Any], wanted: str) -> Gpu | None:
    is_gpu = device["kind"] == "cuda"
    memory = device.get("host_memory_bytes" if wanted == "cpu" and is_gpu else "memory_bytes")
    if not memory:
        return None
    if wanted == "cpu":
        return Gpu(f"the CPU of trainer {trainer}", memory, 0.0)
    name = device.get("name") or ""
    like = gpu_named(name)
    capability = device.get("compute_capability") or (like.capability if like is not None else None)
    return Gpu(f"{name or 'the GPU'} of trainer {trainer}", memory, 0.0, capability and (capability[0], capability[1]))
