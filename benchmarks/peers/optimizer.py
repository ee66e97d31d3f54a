"""The optimizer of the peers' fair rows: ours, built as `TrainingStep` builds it, so that only the rest differs."""

import torch
from torch import Tensor, nn

from benchmarks.peers.workload import LEARNING_RATE, Size, compute_dtype, drafter_weights, run_spec
from drafter_trainer.fused_adamw import adamw_update
from drafter_trainer.optimizer import DrafterOptimizer, FusedUpdate


class SharedOptimizer:
    """Flat fp32 masters, AdamW in one pass, clipping, bf16 weights for the module; begins with the common weights."""

    def __init__(self, module: nn.Module, size: Size, device: torch.device) -> None:
        """Takes over the parameters of `module`, which must have the common names."""
        spec = run_spec(size, device).optimizer
        fused = _fused_update(module, device, sums_gradients=size.batch_rows > 0)
        self._optimizer = DrafterOptimizer(module, spec, compute_dtype=compute_dtype(device), fused=fused)
        # A number would be a constant of the compiled update.
        self._rate = LEARNING_RATE if fused is None else torch.tensor(LEARNING_RATE, device=device)
        self._optimizer.load_weights(drafter_weights(size, device))

    def step(self, numerator: Tensor, weight: Tensor) -> None:
        """Backward of a pack's summed loss, then an update with the gradient divided by `weight`."""
        self.add(numerator, is_first=True)
        self.apply(numerator.detach(), weight)

    def add(self, numerator: Tensor, *, is_first: bool) -> None:
        """Backward of a summed loss, its gradient added to those before unless it is the first."""
        self._optimizer.add_gradients(torch.autograd.grad(numerator, self._optimizer.parameters), is_first=is_first)

    def apply(self, numerator: Tensor, weight: Tensor) -> None:
        """An update with the gradient divided by `weight`; `numerator`: of the step's loss."""
        self._optimizer.apply(self._rate, numerator, weight)


def _fused_update(module: nn.Module, device: torch.device, *, sums_gradients: bool) -> FusedUpdate | None:
    """On CUDA, one graph for each size of a parameter."""
    if device.type != "cuda":
        return None
    from drafter_trainer.flex_policy import compile_owned

    sizes = {parameter.numel() for parameter in module.parameters()}
    return FusedUpdate(compile_owned(adamw_update, name="adamw", graphs=len(sizes)), sums_gradients)
