"""Which trainer may take which run, which of several does, and why a run waits."""

from collections.abc import Mapping, Sequence

from control_api.needs import Need
from control_api.store.tables import Run, Trainer
from slipstream.plan.admission import largest, places
from slipstream.plan.gpus import Gpu, why_not_there
from slipstream.plan.refusal import why_unfit
from slipstream.plan.sizes import RunSizes
from slipstream.run_spec.device import Device, overrides_for
from slipstream.run_spec.spec import RunSpec

_MOST_NAMED = 3
"""Trainers in a sentence."""


def obstacle(run: Run, need: Need, trainer: Trainer) -> str | None:
    """Why the trainer cannot train the run, in a sentence; None when it can."""
    if not _shares_storage(run, trainer):
        whose = f"that {run.name} has, or begins with"
        return f"{trainer.name} does not share the storage that holds the checkpoints {whose}."
    return _unfit(run, need, trainer)


def rank(need: Need, trainer: Trainer) -> tuple[bool, bool, int]:
    """Order among trainers that can take the run, the best one first.

    The smallest that holds it: the largest stays free for who needs it. Before those of unknown memory, and before a
    GPU that a run on the CPU would keep busy. Of a run whose needs are not known, the memory says nothing.
    """
    assert need.spec is not None
    found = places(need.spec.train, trainer.name, trainer.devices)
    wastes_gpu = _device(need.spec) == "cpu" and any(one["kind"] == "cuda" for one in trainer.devices)
    if need.sizes is None:
        return wastes_gpu, False, 0
    holding = [one.memory_bytes for one in found if one is not None and why_unfit(need.sizes, one) is None]
    return wastes_gpu, not holding, min(holding, default=0)


def why_waiting(able: Mapping[str, str], unfit: Sequence[str]) -> str:
    """Why a run waits for those trainers alone that could take it; empty where all could, or there are none.

    Args:
        able: busy trainers that could take it, and the run that each has.
        unfit: why the others cannot.
    """
    why = " ".join(unfit[:_MOST_NAMED])
    if not able or not unfit:
        return why
    names = [f"{trainer} (has run {run})" for trainer, run in able.items()]
    return f"Waits for {' or '.join(names[:_MOST_NAMED])}. {why}"


def misfit(run: Run, need: Need, present: Sequence[Trainer], gone: Sequence[Trainer]) -> str | None:
    """Why the run waits in vain for the trainers that are there, and what to do; None where one could take it.

    Args:
        run: in PENDING.
        need: of the run.
        present: all that are heard of, free or not.
        gone: that were stopped, or are not heard of.
    """
    near = [one for one in present if _shares_storage(run, one)]
    if need.spec is None or not near or any(_unfit(run, need, one) is None for one in near):
        return None
    found = [place for one in near for place in places(need.spec.train, one.name, one.devices) if place is not None]
    if need.sizes is not None and found:
        best = largest(found)
        why = f"No trainer here can hold {run.name}: {why_unfit(need.sizes, best)}"
        remedy = _other_settings(need.sizes, best)
    else:
        why = f"{run.name} {_asks(need.spec)}; the trainers here offer {_kinds(near)}."
        remedy = _other_device(need.spec)
    if back := [one.name for one in gone if obstacle(run, need, one) is None]:
        remedy = f"Start {' or '.join(back[:_MOST_NAMED])} again, which could and is not there."
    return f"{why} {remedy}"


def _other_settings(sizes: RunSizes, best: Gpu) -> str:
    if why_not_there(sizes, best) is not None:
        return "Start a trainer on another GPU, or create the run without what this one cannot compute."
    plan = f"`slipstream plan RECIPE --memory {best.memory_bytes >> 20}MiB` names settings that fit"
    return f"Start a larger trainer, or create the run anew: {plan}."


def _other_device(spec: RunSpec) -> str:
    wanted = _device(spec)
    machine = "on a machine with a GPU" if wanted == "cuda" else "without a GPU"
    overrides = ", ".join(overrides_for(spec.train, "cpu" if wanted == "cuda" else "cuda"))
    return f"Start a trainer {machine}, or create the run with the settings {overrides}."


def _unfit(run: Run, need: Need, trainer: Trainer) -> str | None:
    """Why none of the trainer's devices can train the run, wherever its checkpoints are."""
    if need.spec is None:
        return f"This control API does not understand the definition of {run.name}: {need.problem}."
    found = places(need.spec.train, trainer.name, trainer.devices)
    if not found:
        return f"{run.name} {_asks(need.spec)}; {trainer.name} has {_kinds([trainer])}."
    known = [one for one in found if one is not None]
    if need.sizes is None or len(known) < len(found) or any(why_unfit(need.sizes, one) is None for one in known):
        return None
    return why_unfit(need.sizes, largest(known))


def _shares_storage(run: Run, trainer: Trainer) -> bool:
    return run.storage is None or run.storage == trainer.storage


def _device(spec: RunSpec) -> Device:
    """The only one that it can train on, where there is only one."""
    return "cuda" if spec.train.attention == "flex" or spec.train.device == "cuda" else "cpu"


def _asks(spec: RunSpec) -> str:
    train = spec.train
    return f"asks for {_device(spec)} (train.device is {train.device!r}, train.attention is {train.attention!r})"


def _kinds(present: Sequence[Trainer]) -> str:
    return ", ".join(sorted({device["kind"] for trainer in present for device in trainer.devices}))
