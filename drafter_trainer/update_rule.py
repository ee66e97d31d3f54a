"""What every optimizer of a segment offers, so that a step does not care which one it is."""

from typing import NamedTuple, Protocol

from torch import Tensor


class StepScale(NamedTuple):
    """Of one step, float32 [] each, on the device. `divisor`: of the gradients, clipping included. `not_finite`: 1
    where nothing may change, else 0. `applied_steps`: steps that changed something, this one included."""

    divisor: Tensor
    not_finite: Tensor
    applied_steps: Tensor


class UpdateRule(Protocol):
    """Updates the masters of a segment from its gradient. Nothing waits for the host."""

    def update(self, learning_rate: float | Tensor, scale: StepScale) -> None:
        """Change masters and state in place, or neither where `scale.not_finite` is 1. Uses up the gradient.

        `learning_rate`: a tensor, float32 [] on the device, where the step is recorded as a CUDA graph.
        """

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold to go on: views by key, float32; zeros in a new run."""
