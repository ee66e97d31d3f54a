"""AdamW on flat buffers: a step is one kernel, whatever the layer count.

The kernel is the one behind `torch.optim.AdamW(fused=True)`, called directly: that class keeps a state per tensor,
where one per buffer is wanted, and constructing it loads torch's compiler, two seconds that a CPU run can do without.
"""

import torch
from torch import Tensor

from drafter_trainer.flat_parameters import FlatSegment
from drafter_trainer.update_rule import StepScale
from slipstream.run_spec.spec import OptimizerSpec


class AdamW:
    """AdamW (arXiv 1711.05101) of one segment."""

    def __init__(self, segment: FlatSegment, spec: OptimizerSpec, weight_decay: float) -> None:
        self._segment = segment
        self._spec = spec
        self._weight_decay = weight_decay
        self._exp_avg, self._exp_avg_sq = torch.zeros_like(segment.master), torch.zeros_like(segment.master)

    def update(self, learning_rate: float | Tensor, scale: StepScale) -> None:
        """See `UpdateRule`."""
        # The kernel divides gradients by grad_scale, and changes nothing where found_inf is 1.
        torch._fused_adamw_(
            [self._segment.master],
            [self._segment.gradient],
            [self._exp_avg],
            [self._exp_avg_sq],
            [],
            [scale.applied_steps],
            amsgrad=False,
            lr=learning_rate,
            beta1=self._spec.betas[0],
            beta2=self._spec.betas[1],
            weight_decay=self._weight_decay,
            eps=self._spec.epsilon,
            maximize=False,
            grad_scale=scale.divisor,
            found_inf=scale.not_finite,
        )

    def state(self) -> dict[str, Tensor]:
        """Moments: `exp_avg.<name>`, `exp_avg_sq.<name>`."""
        layout = self._segment.layout
        return layout.by_name(self._exp_avg, "exp_avg.") | layout.by_name(self._exp_avg_sq, "exp_avg_sq.")
