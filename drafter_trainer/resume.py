"""May this recipe go on from that checkpoint? Only if it would learn the same thing from the same place."""

import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import slipstream
from drafter_trainer.checkpoint import CheckpointState
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec

# What may change without changing what is learned. Where files and model lie is not compared: their content is, by the
# identity of the stream and by the target's fingerprint.
_MAY_CHANGE = (
    "data.files",
    "target.model",
    "target.revision",
    "target.trust_remote_code",
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
        SlipstreamError: SPEC_INVALID, naming every setting that differs, with its old and its new value.
    """
    old = _flat(RunSpec.model_validate(state.spec).model_dump(mode="json"))
    new = _flat(spec.model_dump(mode="json"))
    differences = [
        f"{key}: {old.get(key)!r} in the checkpoint, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(_MAY_CHANGE)
    ]
    if differences:
        raise SlipstreamError(
            f"{where} belongs to another run definition:\n  " + "\n  ".join(differences),
            reason=Reason.SPEC_INVALID,
            remedy="Restore these settings to go on (the learning rate's schedule depends on the length of the run, "
            "too), or start a new run: --set name=… or another --run-dir.",
        )


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
    """For the checkpoint: what wrote it."""
    return {
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
