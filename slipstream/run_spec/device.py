"""Where a run trains, decided once by the trainer process; pure, so that a plan can ask the same question."""

from typing import Literal

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TrainSpec

Device = Literal["cpu", "cuda"]

_FITTING = {
    "cpu": ("train.device=cpu", "train.attention=sdpa", "train.precision=float32"),
    "cuda": ("train.device=cuda", "train.attention=flex", "train.precision=bfloat16"),
}


def overrides_for(spec: TrainSpec, device: Device) -> tuple[str, ...]:
    """Overrides with which the run trains on `device`, in the precision that is fast there; none where it does so."""
    attention, other = ("sdpa", "cuda") if device == "cpu" else ("flex", "cpu")
    return () if spec.attention == attention and spec.device != other else _FITTING[device]


def resolve_device(spec: TrainSpec, cuda_available: bool) -> Device:
    """The device of a run, refused where its attention cannot train.

    Compiled flex_attention has no backward on a CPU, and a materialised mask on a GPU is what this project exists to
    prevent: neither is ever chosen in place of the other.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED, with the setting to change.
    """
    if spec.device == "cuda" and not cuda_available:
        raise SlipstreamError(
            "train.device is 'cuda', but torch sees no CUDA device.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Run `slipstream doctor` for what torch sees, or train on the CPU: "
            "--set train.device=cpu --set train.attention=sdpa",
        )
    device: Device = "cuda" if cuda_available and spec.device != "cpu" else "cpu"
    if device == "cpu" and spec.attention == "flex":
        raise SlipstreamError(
            "train.attention is 'flex', but the run would train on the CPU (torch sees no CUDA device), "
            "where flex_attention has no backward.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Train where there is a GPU, or choose the slow materialised mask: --set train.attention=sdpa",
        )
    if device == "cuda" and spec.attention == "sdpa":
        raise SlipstreamError(
            "train.attention is 'sdpa', but the run would train on a GPU, where a materialised mask is never allowed.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Use the compiled kernel: --set train.attention=flex; or stay on the CPU: --set train.device=cpu",
        )
    return device
