"""The optimizer of the peers' fair rows: ours, the very same object that our side trains with."""

import torch
from torch import Tensor, nn

from benchmarks.peers.workload import LEARNING_RATE, Size, compute_dtype, drafter_weights, run_spec
from drafter_trainer.optimizer import DrafterOptimizer


class SharedOptimizer:
    """Flat fp32 masters, one fused AdamW, gradient clipping, bf16 weights for the module; loads the common weights."""

    def __init__(self, module: nn.Module, size: Size, device: torch.device) -> None:
        """Takes over the parameters of `module`, which must have the common names."""
        spec = run_spec(size, device).optimizer
        self._optimizer = DrafterOptimizer(module, spec, compute_dtype=compute_dtype(device))
        self._optimizer.load_weights(drafter_weights(size, device))

    def step(self, numerator: Tensor, weight: Tensor) -> None:
        """Backward of a pack's summed loss, then an update with the gradient divided by `weight`."""
        gradients = torch.autograd.grad(numerator, self._optimizer.parameters)
        self._optimizer.add_gradients(gradients, is_first=True)
        self._optimizer.apply(LEARNING_RATE, numerator.detach(), weight)
