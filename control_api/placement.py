"""Which trainer may take which run."""

from pydantic import ValidationError

from control_api.store.tables import Run, Trainer
from slipstream.errors import SlipstreamError
from slipstream.run_spec.device import resolve_device
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
    has_cuda = any(device["kind"] == "cuda" for device in trainer.devices)
    try:
        resolve_device(spec.train, has_cuda)
    except SlipstreamError:
        if spec.train.attention == "flex":
            wanted = "a GPU, or train.device = 'cpu' and train.attention = 'sdpa'"
        else:
            wanted = "a trainer without a GPU, or train.device = 'cpu'"
        return f"{run.name} needs {wanted}; {trainer.name} has {_devices(trainer)}."
    return None


def _devices(trainer: Trainer) -> str:
    return ", ".join(sorted({device["kind"] for device in trainer.devices}))
