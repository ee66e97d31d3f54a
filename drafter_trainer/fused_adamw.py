"""AdamW in one pass over a segment: master, moments and gradient are read once, the compute weights written on the way.

For CUDA, where the update is bound by memory. In bfloat16 it moves 30 bytes a parameter: masters and moments 24, the
gradient twice 2 (once for its norm), the compute weight 2. With the gradient copied to float32 first, and the masters
to bfloat16 afterwards, it would be 44.

Gradients come as they were computed, one tensor per parameter, so that no float32 buffer for them exists; or as the
flat float32 sum over the packs of a step.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafter_trainer.flat_parameters import FlatSegment
from drafter_trainer.update_rule import StepScale
from slipstream.run_spec.spec import OptimizerSpec


class AdamWState(NamedTuple):
    """Of one tensor, flat; float32 but for `compute`, None where the module computes with the masters."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    compute: Tensor | None


class AdamWNumbers(NamedTuple):
    """Of one step, float32 [] on the device. `divisor`: of the gradient. `skip`: 1 where nothing may change, else 0.
    `kept`: 1 - learning rate times weight decay. `rate`, `root`: the corrections of bias, rate / (1 - β₁ⁿ) and
    √(1 - β₂ⁿ)."""

    divisor: Tensor
    skip: Tensor
    kept: Tensor
    rate: Tensor
    root: Tensor


class AdamWConstants(NamedTuple):
    """Of a run."""

    beta1: float
    beta2: float
    epsilon: float


AdamWUpdate = Callable[[AdamWState, Tensor, AdamWNumbers, AdamWConstants], None]


def adamw_update(state: AdamWState, gradient: Tensor, numbers: AdamWNumbers, constants: AdamWConstants) -> None:
    """Change the state in place; plain tensor code, which a compiler makes one kernel of. `gradient`: any dtype."""
    skip = numbers.skip != 0.0
    divided = gradient.float() / numbers.divisor
    average = torch.lerp(state.exp_avg, divided, 1.0 - constants.beta1)
    square = constants.beta2 * state.exp_avg_sq + (1.0 - constants.beta2) * divided * divided
    denominator = square.sqrt() / numbers.root + constants.epsilon
    weight = state.master * numbers.kept - numbers.rate * (average / denominator)
    weight = torch.where(skip, state.master, weight)
    state.exp_avg.copy_(torch.where(skip, state.exp_avg, average))
    state.exp_avg_sq.copy_(torch.where(skip, state.exp_avg_sq, square))
    state.master.copy_(weight)
    if state.compute is not None:
        state.compute.copy_(weight)


class FusedAdamW:
    """AdamW (arXiv 1711.05101) of one segment; state and checkpoints as those of `AdamW`."""

    def __init__(
        self,
        segment: FlatSegment,
        compute: Tensor | None,
        spec: OptimizerSpec,
        weight_decay: float,
        update: AdamWUpdate,
    ) -> None:
        """`compute`: of the segment, flat; None where the module computes with the masters. `update`: a compiled
        `adamw_update`; it is called with as many shapes as the segment's parameters have, or with the segment's."""
        self._segment = segment
        self._weight_decay = weight_decay
        self._constants = AdamWConstants(*spec.betas, spec.epsilon)
        self._update = update
        self._exp_avg, self._exp_avg_sq = torch.zeros_like(segment.master), torch.zeros_like(segment.master)
        self._whole = AdamWState(segment.master, self._exp_avg, self._exp_avg_sq, compute)
        self._parts = [AdamWState(*of_one) for of_one in zip(*map(self._by_parameter, self._whole), strict=True)]
        self.computed: Sequence[Tensor] | None = None
        """Gradients of the step as they were computed, in the order of the layout; None: `segment.gradient`."""

    @property
    def num_parameters(self) -> int:
        """Tensors of the segment."""
        return len(self._parts)

    def update(self, learning_rate: float | Tensor, scale: StepScale) -> None:
        """See `UpdateRule`; `learning_rate` is a tensor."""
        assert isinstance(learning_rate, Tensor), "a number would be a constant of the compiled update"
        beta1, beta2, _ = self._constants
        numbers = AdamWNumbers(
            divisor=scale.divisor,
            skip=scale.not_finite,
            kept=1.0 - learning_rate * self._weight_decay,
            rate=learning_rate / (1.0 - beta1**scale.applied_steps),
            root=(1.0 - beta2**scale.applied_steps).sqrt(),
        )
        if self.computed is None:
            self._update(self._whole, self._segment.gradient, numbers, self._constants)
            return
        for state, gradient in zip(self._parts, self.computed, strict=True):
            self._update(state, gradient.flatten(), numbers, self._constants)
        self.computed = None

    def _by_parameter(self, flat: Tensor | None) -> Sequence[Tensor | None]:
        layout = self._segment.layout
        return [None] * len(layout.names) if flat is None else [view.flatten() for view in layout.views(flat)]

    def state(self) -> dict[str, Tensor]:
        """Moments: `exp_avg.<name>`, `exp_avg_sq.<name>`."""
        layout = self._segment.layout
        return layout.by_name(self._exp_avg, "exp_avg.") | layout.by_name(self._exp_avg_sq, "exp_avg_sq.")
