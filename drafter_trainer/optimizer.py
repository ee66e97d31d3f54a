"""AdamW with float32 master weights in one flat buffer: a step is a handful of kernels, whatever the layer count.

The kernel is the one behind `torch.optim.AdamW(fused=True)`, called directly: that class keeps a state per tensor,
where one per buffer is wanted, and constructing it loads torch's compiler, two seconds that a CPU run can do without.

A small drafter is bound by launches, not by arithmetic: norm, clipping and update each touch one buffer instead of one
tensor per weight. The module computes with views of the buffer (float32) or of a reduced copy of it (bfloat16).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.run_spec.spec import OptimizerSpec

# Every weight starts at a multiple of so many elements, so that views are aligned for any kernel and any dtype.
_ALIGNMENT = 64


def learning_rate(spec: OptimizerSpec, step: int, total_steps: int) -> float:
    """Linear warm-up, then cosine from `learning_rate` to `final_fraction` of it; a pure function of the step."""
    warmup_steps = round(spec.warmup_fraction * total_steps)
    if step < warmup_steps:
        return spec.learning_rate * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return spec.learning_rate * (spec.final_fraction + (1.0 - spec.final_fraction) * cosine)


@dataclass(frozen=True)
class AppliedStep:
    """What became of an optimizer step; both are scalars on the device, so that nobody has to wait for it."""

    gradient_norm: Tensor
    """Float32, global, before clipping."""
    applied: Tensor
    """Float32: 1, or 0 where loss or gradient was not finite and nothing was changed."""


class DrafterOptimizer:
    """Owns the master weights, the gradients (float32) and the AdamW state of a module whose parameters it takes over.

    Weight decay applies to matrices only: shrinking a norm's gain towards zero regularises nothing.
    """

    def __init__(
        self, module: nn.Module, spec: OptimizerSpec, *, compute_dtype: torch.dtype, packs_per_step: int = 1
    ) -> None:
        """Move the parameters of `module` into flat buffers on their device; their values become float32 masters."""
        self._spec = spec
        named = sorted(module.named_parameters(), key=lambda item: item[1].dim() < 2)
        self.parameters: tuple[nn.Parameter, ...] = tuple(parameter for _, parameter in named)
        self._names = tuple(name for name, _ in named)
        self._offsets, size = _layout(self.parameters)
        device = self.parameters[0].device
        self._master, self._gradient = torch.zeros(size, device=device), torch.zeros(size, device=device)
        self._master_views, self._gradient_views = self._views(self._master), self._views(self._gradient)
        # Where the gradient of a later pack becomes float32 before it is added; one pack needs no sum.
        self._addend = torch.zeros(size if packs_per_step > 1 else 0, device=device)
        self._addend_views = self._views(self._addend) if packs_per_step > 1 else []
        self._packs_added = 0
        torch._foreach_copy_(self._master_views, [parameter.detach() for parameter in self.parameters])
        self._compute = self._master if compute_dtype == torch.float32 else self._master.to(compute_dtype)
        for parameter, view in zip(self.parameters, self._views(self._compute), strict=True):
            parameter.data = view
        matrices_end = next((o for o, p in zip(self._offsets, self.parameters, strict=True) if p.dim() < 2), size)
        self._segments = (
            (slice(0, matrices_end), spec.weight_decay),
            (slice(matrices_end, size), 0.0),
        )
        self._exp_avg, self._exp_avg_sq = torch.zeros_like(self._master), torch.zeros_like(self._master)
        # Float32, because the kernel wants it so; exact up to 16 million steps.
        self._applied_steps = torch.zeros((), device=device)

    def add_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of one pack, in the order of `parameters`, any dtype, to the step's float32 sum."""
        if self._packs_added == 0:
            torch._foreach_copy_(self._gradient_views, list(gradients))
        else:
            torch._foreach_copy_(self._addend_views, list(gradients))
            self._gradient.add_(self._addend)
        self._packs_added += 1

    def apply(self, step_learning_rate: float, loss: Tensor, weight: Tensor) -> AppliedStep:
        """Divide the gradients by `weight`, clip, update, and begin a new sum.

        Where `loss` or the gradient is not finite, weights and AdamW state stay as they are; that is decided on the
        device, without a host sync.

        Args:
            step_learning_rate: for this step.
            loss: float32 [], of the step.
            weight: float32 [], positive: what the summed numerators of the step are divided by.
        """
        norm = torch.linalg.vector_norm(self._gradient) / weight
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        not_finite = (~finite).float()
        clip = (norm / self._spec.clip_norm).clamp(min=1.0)
        self._applied_steps += 1.0 - not_finite
        # The kernel divides gradients by grad_scale, and changes nothing where found_inf is 1.
        for segment, weight_decay in self._segments:
            torch._fused_adamw_(
                [self._master[segment]],
                [self._gradient[segment]],
                [self._exp_avg[segment]],
                [self._exp_avg_sq[segment]],
                [],
                [self._applied_steps],
                amsgrad=False,
                lr=step_learning_rate,
                beta1=self._spec.betas[0],
                beta2=self._spec.betas[1],
                weight_decay=weight_decay,
                eps=self._spec.epsilon,
                maximize=False,
                grad_scale=clip * weight,
                found_inf=not_finite,
            )
        self._packs_added = 0
        self._refresh_compute_weights()
        return AppliedStep(norm, finite.float())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set the masters in place from float32 tensors by parameter name, and clear the AdamW state.

        In place, because compiled code and recorded graphs hold the addresses.
        """
        for name, view in zip(self._names, self._master_views, strict=True):
            view.copy_(weights[name])
        for state in (self._exp_avg, self._exp_avg_sq, self._applied_steps):
            state.zero_()
        self._packs_added = 0
        self._refresh_compute_weights()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Set the AdamW state in place to what `state_tensors` returned."""
        for kind, flat in self._moments():
            for name, view in zip(self._names, self._views(flat), strict=True):
                view.copy_(state[f"{kind}.{name}"])
        self._applied_steps.copy_(state["step"])

    def weights(self) -> dict[str, Tensor]:
        """Float32 master weights by parameter name; views, not copies."""
        return dict(zip(self._names, self._master_views, strict=True))

    def state_tensors(self) -> dict[str, Tensor]:
        """AdamW moments per parameter (`exp_avg.<name>`, `exp_avg_sq.<name>`) and the count of applied steps."""
        tensors = {
            f"{kind}.{name}": view
            for kind, flat in self._moments()
            for name, view in zip(self._names, self._views(flat), strict=True)
        }
        tensors["step"] = self._applied_steps
        return tensors

    def _moments(self) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
        return ("exp_avg", self._exp_avg), ("exp_avg_sq", self._exp_avg_sq)

    def _views(self, buffer: Tensor) -> list[Tensor]:
        """Views of a flat buffer with the parameters' shapes."""
        return [
            buffer[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self._offsets, self.parameters, strict=True)
        ]

    def _refresh_compute_weights(self) -> None:
        if self._compute is not self._master:
            self._compute.copy_(self._master)


def _layout(parameters: Sequence[nn.Parameter]) -> tuple[list[int], int]:
    """(offset of each parameter, total size), in elements."""
    offsets: list[int] = []
    size = 0
    for parameter in parameters:
        offsets.append(size)
        size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    return offsets, size
