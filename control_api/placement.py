"""Which trainer may take which run."""

from collections.abc import Sequence

from pydantic import ValidationError

from control_api.store.tables import Run, Trainer
from slipstream.errors import SlipstreamError
from slipstream.run_spec.device import Device, overrides_for, resolve_device
from slipstream.run_spec.problems import describe_problem
from slipstream.run_spec.spec import RunSpec


def obstacle(run: Run, trainer: Trainer) -> str | None:
    """Why the trainer cannot train the run, in a sentence; None when it can."""
    if run.storage is not None and run.storage != trainer.storage:
        return f"{trainer.name} does not share the storage that holds the checkpoints of {run.name}."
    try:
        spec = RunSpec.model_validate(run.spec)
    except ValidationError as error:  # another version wrote it, or a package has gone that brought its drafter
        problems = "; ".join(describe_problem(problem, {}) for problem in error.errors())
        return f"This control API does not understand the definition of {run.name}: {problems}."
    if _has_device(spec, trainer):
        return None
    return f"{run.name} {_asks(spec)}; {trainer.name} has {_kinds([trainer])}."


def misfit(run: Run, present: Sequence[Trainer]) -> str | None:
    """Why the run waits in vain for the trainers that are there, and what to do; None where one has such a device.

    Args:
        run: in PENDING.
        present: all that are heard of, free or not.
    """
    try:
        spec = RunSpec.model_validate(run.spec)
    except ValidationError:
        return None  # `obstacle` says why
    if not present or any(_has_device(spec, trainer) for trainer in present):
        return None
    wanted = _device(spec)
    machine = "on a machine with a GPU" if wanted == "cuda" else "without a GPU"
    overrides = ", ".join(overrides_for(spec.train, "cpu" if wanted == "cuda" else "cuda"))
    return (
        f"{run.name} {_asks(spec)}; the trainers here offer {_kinds(present)}. "
        f"Start a trainer {machine}, or create the run with the settings {overrides}."
    )


def _has_device(spec: RunSpec, trainer: Trainer) -> bool:
    try:
        resolve_device(spec.train, any(device["kind"] == "cuda" for device in trainer.devices))
    except SlipstreamError:
        return False
    return True


def _device(spec: RunSpec) -> Device:
    """The only one that it can train on, where there is only one."""
    return "cuda" if spec.train.attention == "flex" or spec.train.device == "cuda" else "cpu"


def _asks(spec: RunSpec) -> str:
    train = spec.train
    return f"asks for {_device(spec)} (train.device is {train.device!r}, train.attention is {train.attention!r})"


def _kinds(present: Sequence[Trainer]) -> str:
    return ", ".join(sorted({device["kind"] for trainer in present for device in trainer.devices}))
