"""AdamW with float32 master weights in one flat buffer: a step is a handful of kernels, whatever the layer count.

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
_MOMENTS = ("exp_avg", "exp_avg_sq")


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
        self._adamw = self._make_adamw([slice(0, matrices_end), slice(matrices_end, size)])

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
        # AdamW divides gradients by grad_scale and leaves everything alone where found_inf is 1.
        clip = (norm / self._spec.clip_norm).clamp(min=1.0)
        self._adamw.grad_scale = clip * weight  # type: ignore[attr-defined]
        self._adamw.found_inf = (~finite).float()  # type: ignore[attr-defined]
        for group in self._adamw.param_groups:
            group["lr"] = step_learning_rate
        self._adamw.step()
        self._packs_added = 0
        self._refresh_compute_weights()
        return AppliedStep(norm, finite.float())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set the masters in place from float32 tensors by parameter name, and clear the AdamW state.

        In place, because compiled code and recorded graphs hold the addresses.
        """
        for name, view in zip(self._names, self._master_views, strict=True):
            view.copy_(weights[name])
        for state in self._adamw.state.values():
            for tensor in state.values():
                tensor.zero_()
        self._packs_added = 0
        self._refresh_compute_weights()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Set the AdamW state in place to what `state_tensors` returned."""
        for kind in _MOMENTS:
            for name, view in zip(self._names, self._moment_views(kind), strict=True):
                view.copy_(state[f"{kind}.{name}"])
        for segment_state in self._adamw.state.values():
            segment_state["step"].copy_(state["step"])

    def weights(self) -> dict[str, Tensor]:
        """Float32 master weights by parameter name; views, not copies."""
        return dict(zip(self._names, self._master_views, strict=True))

    def state_tensors(self) -> dict[str, Tensor]:
        """AdamW moments per parameter (`exp_avg.<name>`, `exp_avg_sq.<name>`) and the count of applied steps."""
        tensors = {
            f"{kind}.{name}": view
            for kind in _MOMENTS
            for name, view in zip(self._names, self._moment_views(kind), strict=True)
        }
        tensors["step"] = next(iter(self._adamw.state.values()))["step"]
        return tensors

    def _make_adamw(self, segments: Sequence[slice]) -> torch.optim.AdamW:
        """AdamW over two flat tensors: the matrices with weight decay, the rest without."""
        groups: list[dict[str, object]] = []
        for segment, weight_decay in zip(segments, (self._spec.weight_decay, 0.0), strict=True):
            flat = nn.Parameter(self._master[segment])
            flat.grad = self._gradient[segment]
            groups.append({"params": [flat], "weight_decay": weight_decay})
        adamw = torch.optim.AdamW(
            groups, lr=self._spec.learning_rate, betas=self._spec.betas, eps=self._spec.epsilon, fused=True
        )
        # Made here, not at the first step, so that a resumed run can fill it without having stepped.
        for group in adamw.param_groups:
            (flat,) = group["params"]
            moments = {kind: torch.zeros_like(flat) for kind in _MOMENTS}
            adamw.state[flat] = {"step": torch.zeros((), device=flat.device), **moments}
        return adamw

    def _moment_views(self, kind: str) -> list[Tensor]:
        """Views of one kind of moment with the parameters' shapes; the two segments lie one behind the other."""
        flats = [self._adamw.state[group["params"][0]][kind] for group in self._adamw.param_groups]
        matrices = len([parameter for parameter in self.parameters if parameter.dim() >= 2])
        return [
            view
            for flat, part, start in (
                (flats[0], slice(0, matrices), 0),
                (flats[1], slice(matrices, None), flats[0].numel()),
            )
            for view in _views(flat, [o - start for o in self._offsets[part]], self.parameters[part])
        ]

    def _views(self, buffer: Tensor) -> list[Tensor]:
        return _views(buffer, self._offsets, self.parameters)

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


def _views(buffer: Tensor, offsets: Sequence[int], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Views of `buffer` with the parameters' shapes."""
    return [
        buffer[offset : offset + parameter.numel()].view(parameter.shape)
        for offset, parameter in zip(offsets, parameters, strict=True)
    ]
