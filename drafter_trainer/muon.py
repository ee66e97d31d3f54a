"""Muon for the drafter's matrices: torch's own, on views of the flat masters.

Every matrix of a drafter is one of its body, `fc` included: embedding and head are the target's and are not trained.
"""

import torch
from torch import Tensor

from drafter_trainer.flat_parameters import FlatSegment
from drafter_trainer.update_rule import StepScale
from slipstream.run_spec.spec import OptimizerSpec

_MOMENTUM = 0.95
_TIMES_ADAMW = 10.0
"""Muon's learning rate by default, as a multiple of AdamW's: what speculators recommends for DFlash."""


class MatrixMuon:
    """Muon (kellerjordan.github.io/posts/muon; arXiv 2502.16982): steps along the orthogonalised momentum.

    A matrix of r rows and c columns moves by learning rate times √max(1, r/c), whatever the size of its gradient.
    """

    def __init__(self, segment: FlatSegment, spec: OptimizerSpec) -> None:
        """All parameters of the segment have two dimensions."""
        self._segment = segment
        self._times_adamw = (
            _TIMES_ADAMW if spec.muon_learning_rate is None else spec.muon_learning_rate / spec.learning_rate
        )
        self._momentum = torch.zeros_like(segment.master)
        layout = segment.layout
        masters = layout.views(segment.master)
        self._muon = torch.optim.Muon(
            masters,
            weight_decay=spec.weight_decay,
            momentum=_MOMENTUM if spec.muon_momentum is None else spec.muon_momentum,
        )
        views = zip(masters, layout.views(segment.gradient), layout.views(self._momentum), strict=True)
        for master, gradient, momentum in views:
            master.grad = gradient
            self._muon.state[master]["momentum_buffer"] = momentum

    def update(self, learning_rate: float | Tensor, scale: StepScale) -> None:
        """See `UpdateRule`; `learning_rate` is AdamW's at this step, a number: torch's Muon reads it on the host."""
        assert isinstance(learning_rate, float), "a step with Muon is never recorded"
        master, gradient = self._segment.master, self._segment.gradient
        not_finite = scale.not_finite.bool()
        # torch's Muon knows no skipped step. A gradient that is the momentum leaves the momentum as it is, and the
        # masters are put back: all decided on the device.
        torch.where(not_finite, self._momentum, gradient.div_(scale.divisor), out=gradient)
        before = master.clone()
        for group in self._muon.param_groups:
            group["lr"] = self._times_adamw * learning_rate
        self._muon.step()
        torch.where(not_finite, before, master, out=master)

    def state(self) -> dict[str, Tensor]:
        """`momentum.<name>`"""
        return self._segment.layout.by_name(self._momentum, "momentum.")
