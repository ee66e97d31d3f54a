"""⑫ Float32 master weights, gradients and optimizer state of a drafter, in flat buffers, behind one step.

The module computes with views of the masters (float32) or of a reduced copy of them (bfloat16). Matrices are updated by
AdamW or Muon, norms always by AdamW; a moving average follows where the recipe asks for one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafter_trainer.adamw import AdamW
from drafter_trainer.ema import WeightAverage
from drafter_trainer.flat_parameters import FlatLayout, FlatSegment
from drafter_trainer.fused_adamw import AdamWUpdate, FusedAdamW
from drafter_trainer.muon import MatrixMuon
from drafter_trainer.update_rule import StepScale, UpdateRule
from slipstream.run_spec.spec import OptimizerSpec

_EXCHANGED_AT_ONCE = 1 << 24
"""Weights, when an average takes the masters' place for a while."""


@dataclass(frozen=True)
class AppliedStep:
    """What became of an optimizer step; both are scalars on the device, so that nobody has to wait for it."""

    gradient_norm: Tensor
    """Float32, global, before clipping."""
    applied: Tensor
    """Float32: 1, or 0 where loss or gradient was not finite and nothing was changed."""


@dataclass(frozen=True)
class FusedUpdate:
    """`update`: a compiled `adamw_update`. `sums_gradients`: keep a float32 sum over the packs of a step; without it a
    step has one pack, whose gradients are used as they were computed."""

    update: AdamWUpdate
    sums_gradients: bool


class DrafterOptimizer:
    """Owns the master weights, the gradients (float32) and the optimizer state of a module whose parameters it takes
    over.

    Weight decay applies to matrices only: shrinking a norm's gain towards zero regularises nothing.
    """

    def __init__(
        self, module: nn.Module, spec: OptimizerSpec, *, compute_dtype: torch.dtype, fused: FusedUpdate | None = None
    ) -> None:
        """Move the parameters of `module` into flat buffers on their device; their values become float32 masters.

        `fused`: for AdamW, instead of torch's kernel.
        """
        assert fused is None or spec.kind == "adamw"
        self._spec = spec
        self._fused = fused
        matrices = [(name, parameter) for name, parameter in module.named_parameters() if parameter.dim() >= 2]
        vectors = [(name, parameter) for name, parameter in module.named_parameters() if parameter.dim() < 2]
        self.parameters: tuple[nn.Parameter, ...] = tuple(parameter for _, parameter in matrices + vectors)
        self._layout = FlatLayout.of(matrices + vectors)
        size, device = self._layout.size, self.parameters[0].device
        self._master = torch.zeros(size, device=device)
        torch._foreach_copy_(self._layout.views(self._master), [parameter.detach() for parameter in self.parameters])
        # Of the one pack of a step, as computed; else the sum over packs.
        self._computed: list[Tensor] | None = [] if fused is not None and not fused.sums_gradients else None
        self._gradient = torch.zeros(size if self._computed is None else 0, device=device)
        self._gradient_views = [] if self._computed is not None else self._layout.views(self._gradient)
        self._compute = self._master if compute_dtype == torch.float32 else self._master.to(compute_dtype)
        for parameter, view in zip(self.parameters, self._layout.views(self._compute), strict=True):
            parameter.data = view
        self._rules = self._make_rules(FlatLayout.of(matrices), FlatLayout.of(vectors))
        self._average = None if spec.ema_decay is None else WeightAverage(self._master, spec.ema_decay)
        # Float32, because the kernel wants it so; exact up to 16 million steps.
        self._applied_steps = torch.zeros((), device=device)
        self._on_new_weights: Callable[[], None] | None = None

    def on_new_weights(self, listener: Callable[[], None]) -> None:
        """Call `listener`, without gradients, whenever the module's weights have got other values."""
        self._on_new_weights = listener

    def add_gradients(self, gradients: Sequence[Tensor], *, is_first: bool) -> None:
        """Add the gradients of one pack, in the order of `parameters`, any dtype, to the step's float32 sum.

        `is_first`: of the step; its sum begins here.
        """
        if self._computed is not None:
            assert is_first, "steps of several packs need a sum"
            self._computed = list(gradients)
        elif is_first:
            torch._foreach_copy_(self._gradient_views, list(gradients))
        else:
            torch._foreach_add_(self._gradient_views, list(gradients))

    def apply(self, step_learning_rate: float | Tensor, loss: Tensor, weight: Tensor) -> AppliedStep:
        """Divide the gradients by `weight`, clip, update.

        Where `loss` or the gradient is not finite, weights and optimizer state stay as they are; that is decided on the
        device, without a host sync.

        Args:
            step_learning_rate: for this step, of AdamW; float32 [] on the device where the step is recorded.
            loss: float32 [], of the step.
            weight: float32 [], positive: what the summed numerators of the step are divided by.
        """
        norm = self._gradient_norm() / weight
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        not_finite = (~finite).float()
        clip = (norm / self._spec.clip_norm).clamp(min=1.0)
        self._applied_steps += 1.0 - not_finite
        scale = StepScale(clip * weight, not_finite, self._applied_steps)
        self._hand_over_computed()
        for rule in self._rules:
            rule.update(step_learning_rate, scale)
        if self._average is not None:
            self._average.update(self._applied_steps, finite.float())
        if self._fused is None:
            self._refresh_compute_weights()
        self._tell_of_new_weights()
        return AppliedStep(norm, finite.float())

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set the masters in place from float32 tensors by parameter name, and clear the optimizer's state.

        In place, because compiled code and recorded graphs hold the addresses. A moving average begins anew there.
        """
        for name, view in self.weights().items():
            view.copy_(weights[name])
        for rule in self._rules:
            for tensor in rule.state().values():
                tensor.zero_()
        self._applied_steps.zero_()
        if self._average is not None:
            self._average.reset()
        self._refresh_compute_weights()
        self._tell_of_new_weights()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Set in place what `state_tensors` returned, after `load_weights` with what `deployed_weights` returned."""
        for key, tensor in self.state_tensors().items():
            tensor.copy_(state[key])
        self._refresh_compute_weights()
        self._tell_of_new_weights()

    def weights(self) -> dict[str, Tensor]:
        """Float32 master weights by parameter name; views, not copies."""
        return self._layout.by_name(self._master)

    def deployed_weights(self) -> dict[str, Tensor]:
        """What is evaluated and exported, float32 by name: the moving average if there is one, else the masters."""
        return self._layout.by_name(self._master if self._average is None else self._average.average)

    @contextmanager
    def deployed_in_place(self) -> Iterator[None]:
        """Within the block the module computes with the deployed weights; afterwards all is as it was, bit for bit."""
        if self._average is None:
            yield
            return
        self._exchange_with_average()
        try:
            yield
        finally:
            self._exchange_with_average()

    def state_tensors(self) -> dict[str, Tensor]:
        """All that a resumed run needs besides `deployed_weights`: the rules' state, the count of applied steps
        (`step`), and with a moving average the masters (`master.<name>`); views."""
        tensors = {key: tensor for rule in self._rules for key, tensor in rule.state().items()}
        if self._average is not None:
            tensors |= self._layout.by_name(self._master, "master.")
        return tensors | {"step": self._applied_steps}

    def _make_rules(self, matrices: FlatLayout, vectors: FlatLayout) -> tuple[UpdateRule, ...]:
        """Matrices lie before vectors."""
        end, spec = matrices.size, self._spec
        of_matrices = FlatSegment(matrices, self._master[:end], self._gradient[:end])
        of_vectors = FlatSegment(vectors, self._master[end:], self._gradient[end:])
        if self._fused is not None:
            reduced = self._compute is not self._master
            return (
                FusedAdamW(
                    of_matrices, self._compute[:end] if reduced else None, spec, spec.weight_decay, self._fused.update
                ),
                FusedAdamW(of_vectors, self._compute[end:] if reduced else None, spec, 0.0, self._fused.update),
            )
        body: UpdateRule = (
            MatrixMuon(of_matrices, spec) if spec.kind == "muon" else AdamW(of_matrices, spec, spec.weight_decay)
        )
        return body, AdamW(of_vectors, spec, 0.0)

    def _gradient_norm(self) -> Tensor:
        if self._computed is None:
            return torch.linalg.vector_norm(self._gradient)
        norms = torch._foreach_norm(self._computed, 2, dtype=torch.float32)
        return torch.linalg.vector_norm(torch.stack(norms))

    def _hand_over_computed(self) -> None:
        """To the rules, which give the memory back with the step."""
        if self._computed is None:
            return
        begin = 0
        for rule in self._rules:
            assert isinstance(rule, FusedAdamW)
            rule.computed = self._computed[begin : begin + rule.num_parameters]
            begin += rule.num_parameters
        self._computed = []

    def _exchange_with_average(self) -> None:
        """In place and piece by piece: a copy of all would be another four bytes a parameter."""
        assert self._average is not None
        for master, average in zip(
            self._master.split(_EXCHANGED_AT_ONCE), self._average.average.split(_EXCHANGED_AT_ONCE), strict=True
        ):
            kept = master.clone()
            master.copy_(average)
            average.copy_(kept)
        self._refresh_compute_weights()
        self._tell_of_new_weights()

    def _refresh_compute_weights(self) -> None:
        if self._compute is not self._master:
            self._compute.copy_(self._master)

    def _tell_of_new_weights(self) -> None:
        if self._on_new_weights is not None:
            # A compiled listener has one graph, in whichever mode the caller is.
            with torch.no_grad():
                self._on_new_weights()
