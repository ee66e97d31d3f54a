"""May this recipe go on from that checkpoint? Only if it would learn the same thing from the same place."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

import slipstream
from drafter_trainer.checkpoint_state import CheckpointState
from slipstream.errors import SlipstreamError
from slipstream.run_spec.architectures import remedy_where_missing
from slipstream.run_spec.problems import describe_problem
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec

# What may change without changing what is learned. Where files and model lie is not compared: their content is, by the
# identity of the stream and by the target's fingerprint.
_MAY_CHANGE = (
    "data.files",
    "target.model",
    "target.revision",
    "target.trust_remote_code",
    "target.compile",
    "train.device",
    "train.attention",
    "train.max_not_finite_steps",
    "stream.",
    "checkpoint.",
    "eval.",
)


def check_same_run(state: CheckpointState, spec: RunSpec, *, where: str) -> None:
    """Refuse a recipe that would continue the checkpoint as another run.

    Raises:
        SlipstreamError: SPEC_INVALID, naming every setting that differs, with its old and its new value;
            CHECKPOINT_INVALID when the checkpoint's own definition is none that this version knows.
    """
    old = _flat(_definition_of(state, where).model_dump(mode="json"))
    new = _flat(spec.model_dump(mode="json"))
    differences = [
        f"{key}: {old.get(key)!r} in the checkpoint, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if _compared(key, old.get(key)) != _compared(key, new.get(key)) and not key.startswith(_MAY_CHANGE)
    ]
    if differences:
        raise SlipstreamError(
            f"{where} belongs to another run definition:\n  " + "\n  ".join(differences),
            reason=Reason.SPEC_INVALID,
            remedy="Restore these settings to go on (the learning rate's schedule depends on the length of the run, "
            "too), or start a new run: --set name=… or another --run-dir.",
        )


def _compared(key: str, value: Any) -> Any:
    """A first drafter by its last name: it may have been moved, and a path that is gone reads as the name of a run."""
    return Path(value).name if key == "drafter.init_from" and isinstance(value, str) else value


def check_same_length(state: CheckpointState, total_steps: int) -> None:
    """Refuse a run that has become longer or shorter: its learning rates would be others than those planned.

    Raises:
        SlipstreamError: STREAM_CHANGED.
    """
    if state.total_steps != total_steps:
        raise SlipstreamError(
            f"Run {state.run} was planned for {state.total_steps} steps, its stream now gives {total_steps}.",
            reason=Reason.STREAM_CHANGED,
            remedy="The learning rate's schedule depends on the length of the run. Start it as it was started first "
            "(stream.start, the same data), or start a new run: --set name=… or another --run-dir.",
        )


def _definition_of(state: CheckpointState, where: str) -> RunSpec:
    try:
        return RunSpec.model_validate(state.spec)
    except ValidationError as error:
        problems = [describe_problem(problem, {}) for problem in error.errors()]
        raise SlipstreamError(
            f"{where} holds a run definition that cannot be understood:\n  " + "\n  ".join(problems),
            reason=Reason.CHECKPOINT_INVALID,
            remedy=remedy_where_missing(error)
            or f"It was written by Slipstream {state.versions.get('slipstream', 'of an unknown version')}, this is "
            f"{slipstream.__version__}: resume with that one, or start a new run: --set name=… or another --run-dir.",
        ) from error


def rng_state() -> dict[str, Tensor]:
    """The global generators of torch, uint8 [n] each."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng_state(state: Mapping[str, Tensor]) -> None:
    """Set what `rng_state` returned; a run that changed from CPU to GPU has no CUDA state to restore."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def versions() -> dict[str, str]:
    """For the checkpoint: what wrote it, and on what."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "machine": f"{gpu}, {os.cpu_count()} CPU cores",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "slipstream": slipstream.__version__,
    }


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
