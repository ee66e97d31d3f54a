"""Muon for the drafter's matrices, those of one shape at a time.

Every matrix of a drafter is one of its body, `fc` included: embedding and head are the target's and are not trained.

torch.optim.Muon computes the same, one matrix after another, with a learning rate that it reads on the host. For a
small drafter that is hundreds of launches of tiny products, which no CUDA graph can record. Decision 0018.
"""

import math
from collections import defaultdict

import torch
from torch import Tensor

from drafter_trainer.flat_parameters import FlatLayout, FlatSegment
from drafter_trainer.update_rule import StepScale
from slipstream.plan.sizes import MUON_NUMBERS_AT_ONCE
from slipstream.run_spec.spec import OptimizerSpec

_MOMENTUM = 0.95
_TIMES_ADAMW = 10.0
"""Muon's learning rate by default, as a multiple of AdamW's: what speculators recommends for DFlash."""
_POLYNOMIAL = 3.4445, -4.775, 2.0315
"""Of one iteration: a·x + b·x³ + c·x⁵ on every singular value; steep at 0, and it keeps what is in (0, 1] near 1."""
_ITERATIONS = 5
_LEAST_NORM = 1e-7


class MatrixMuon:
    """Muon (kellerjordan.github.io/posts/muon; arXiv 2502.16982): steps along the orthogonalised momentum.

    A matrix of r rows and c columns moves by learning rate times √max(1, r/c), whatever the size of its gradient.
    """

    def __init__(self, segment: FlatSegment, spec: OptimizerSpec) -> None:
        """All parameters of the segment have two dimensions."""
        self._master, self._gradient, self._layout = segment.master, segment.gradient, segment.layout
        self._times_adamw = (
            _TIMES_ADAMW if spec.muon_learning_rate is None else spec.muon_learning_rate / spec.learning_rate
        )
        self._decay = spec.weight_decay
        self._inertia = _MOMENTUM if spec.muon_momentum is None else spec.muon_momentum
        self._momentum = torch.zeros_like(segment.master)
        gradients = segment.layout.views(segment.gradient)
        self._batches = [[gradients[index] for index in batch] for batch in batches_of(segment.layout)]

    def update(self, learning_rate: float | Tensor, scale: StepScale) -> None:
        """See `UpdateRule`; `learning_rate` is AdamW's at this step."""
        master, gradient, momentum = self._master, self._gradient, self._momentum
        # A gradient that is the momentum leaves the momentum as it is, and a rate of 0 the masters: a skipped step is
        # decided on the device, and what is not finite goes no further than here.
        torch.where(scale.not_finite.bool(), momentum, gradient.div_(scale.divisor), out=gradient)
        momentum.lerp_(gradient, 1.0 - self._inertia)
        gradient.lerp_(momentum, self._inertia)  # Nesterov's: one step ahead
        for batch in self._batches:
            rows, columns = batch[0].shape
            directions = torch.empty(len(batch), rows, columns, dtype=torch.bfloat16, device=master.device)
            torch._foreach_copy_(list(directions.unbind()), batch)
            torch._foreach_copy_(batch, list(orthogonalised(directions).unbind()))
            if rows > columns:
                torch._foreach_mul_(batch, math.sqrt(rows / columns))
        rate = learning_rate * self._times_adamw * (1.0 - scale.not_finite)
        master.mul_(1.0 - rate * self._decay)
        master.sub_(gradient.mul_(rate))

    def state(self) -> dict[str, Tensor]:
        """`momentum.<name>`"""
        return self._layout.by_name(self._momentum, "momentum.")


def orthogonalised(matrices: Tensor) -> Tensor:
    """Singular values drawn to about 1 (0.7 to 1.2), singular vectors kept: bfloat16 `[k, r, c]` → the same shape.

    Newton-Schulz iteration in bfloat16; a matrix of zeros stays one.
    """
    a, b, c = _POLYNOMIAL
    is_tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if is_tall else matrices
    wide = wide / torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True).clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.baddbmm(wide, gram, wide, beta=a)
    return wide.mT if is_tall else wide


def batches_of(layout: FlatLayout) -> list[list[int]]:
    """Indices of parameters that are orthogonalised together: of one shape, and not too many."""
    by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, shape in enumerate(layout.shapes):
        by_shape[shape].append(index)
    batches = []
    for shape, indices in by_shape.items():
        most = max(1, MUON_NUMBERS_AT_ONCE // math.prod(shape))
        batches += [indices[first : first + most] for first in range(0, len(indices), most)]
    return batches
