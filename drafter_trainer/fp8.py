"""Matrix products in FP8, half the time of bfloat16 where the tensor cores have them: `train.fp8`, off by default.

Of the drafter's linear layers all backward products, `dx = dy W` and `dW = dyᵀ x`, and the MLP's forward `y = x Wᵀ`;
both products of the frozen head. The other forwards stay bfloat16: their rounding, carried through the layers, would
cost the gradients more than all the rest. See docs/decisions/0011-fp8-products.md.

A tensor is divided by one float32 scale, from its largest entry at that moment, and rounded to e4m3 (three bits of
mantissa). Sums are float32, results bfloat16; master weights, optimizer and checkpoints know nothing of it.

The kernels want both operands with the contracted dimension last in memory, so that what takes part in two products is
kept in two layouts.

Shapes: R rows, K inputs, N outputs of a layer; D hidden size, V vocabulary.
"""

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.errors import SlipstreamError
from slipstream.gpu_limits import FIRST_WITH_FP8
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event

FP8 = torch.float8_e4m3fn
MULTIPLE = 16
"""Every dimension of a product but its rows."""
SMALLEST_WIDTH = 512
"""Below, rounding and its launches cost what the product gains."""

_LARGEST = torch.finfo(FP8).max
# A tensor of zeros has a scale too.
_SMALLEST_MAXIMUM = 1e-30
_HEAD_ROWS_AT_ONCE = 4096
_FORWARD_TOO = ".mlp."
_REMEDY = "Train without: --set train.fp8=false"

_log = logging.getLogger(__name__)


class Quantised(NamedTuple):
    """`values` times `scale`, float32 [], is about the tensor that was rounded."""

    values: Tensor
    scale: Tensor


def quantise(tensor: Tensor) -> Quantised:
    """Round to FP8 with one scale. What is not finite makes the whole result NaN, and so the step's loss."""
    scale = scale_of(tensor)
    return Quantised(round_to(tensor, scale), scale)


def scale_of(tensor: Tensor) -> Tensor:
    """With which the largest entry becomes FP8's largest number: float32 []."""
    return tensor.abs().amax().float().clamp(min=_SMALLEST_MAXIMUM) / _LARGEST


def round_to(tensor: Tensor, scale: Tensor) -> Tensor:
    """tensor / scale in FP8, contiguous; what lies outside its range becomes its largest number."""
    return (tensor.float() / scale).clamp(-_LARGEST, _LARGEST).to(FP8).contiguous()


def both_layouts(matrix: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """matrix [R, C] / scale in FP8, and its transpose, both contiguous."""
    rows = round_to(matrix, scale)
    return rows, rows.t().contiguous()


def product(left: Quantised, right: Quantised, *, fast: bool = True) -> Tensor:
    """left [R, K] times the transpose of right [N, K], both contiguous: bfloat16 [R, N].

    Args:
        left: K and N are multiples of 16.
        right: as left.
        fast: let the tensor cores keep fewer bits of their partial sums: an error well below that of the operands'
            rounding. Hopper is faster so; others ignore it.
    """
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        scale_a=left.scale,
        scale_b=right.scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


class _LinearProduct(torch.autograd.Function):
    """x [R, K], with a weight that was rounded before; R is a multiple of 16, for dW contracts it.

    `rounded` is None where the forward is bfloat16.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, rounded: Tensor | None, transposed: Tensor, weight_scale: Tensor
    ) -> Tensor:
        states_q = quantise(states)
        ctx.save_for_backward(states_q.values.t().contiguous(), states_q.scale, transposed, weight_scale)
        if rounded is None:
            return states @ weight.t()
        return product(states_q, Quantised(rounded, weight_scale))

    @staticmethod
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        states_transposed, states_scale, transposed, weight_scale = ctx.saved_tensors
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        scale = scale_of(by_output)
        rows, columns = both_layouts(by_output, scale)
        by_states = by_weight = None
        if needs_states:
            by_states = product(Quantised(rows, scale), Quantised(transposed, weight_scale))
        if needs_weight:
            by_weight = product(Quantised(columns, scale), Quantised(states_transposed, states_scale))
        return by_states, by_weight, None, None, None


class Fp8Linear(nn.Module):
    """In place of an `nn.Linear` without bias, with its parameter: gradients arrive there, values come from there.

    `refresh` rounds the weight; until then, and again after the weight has changed, results mean nothing.
    """

    rounded: Tensor | None
    transposed: Tensor
    scale: Tensor

    def __init__(self, weight: nn.Parameter, *, forward_too: bool) -> None:
        """`weight`: bfloat16 [N, K]. `forward_too`: or the backward's products alone."""
        super().__init__()
        self.weight = weight
        rounded = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        self.register_buffer("rounded", rounded if forward_too else None, persistent=False)
        self.register_buffer(
            "transposed", torch.empty_like(rounded.t(), memory_format=torch.contiguous_format), persistent=False
        )
        self.register_buffer("scale", torch.ones((), device=weight.device), persistent=False)

    def refresh(self) -> None:
        """Round the weight, in place. Call without gradients."""
        weight = quantise(self.weight)
        if self.rounded is not None:
            self.rounded.copy_(weight.values)
        self.transposed.copy_(weight.values.t())
        self.scale.copy_(weight.scale)

    def forward(self, states: Tensor) -> Tensor:
        """bfloat16 [R, K] → [R, N]."""
        rows = states.shape[0]
        if missing := -rows % MULTIPLE:
            states = functional.pad(states, (0, 0, 0, missing))
        return _LinearProduct.apply(states, self.weight, self.rounded, self.transposed, self.scale)[:rows]


@dataclass(frozen=True)
class Fp8Head:
    """The frozen head [V, D], rounded once; no bfloat16 copy is needed beside it."""

    rounded: Tensor
    """[V, D]"""
    transposed: Tensor
    """[D, V]"""
    scale: Tensor

    @classmethod
    def of(cls, head: Tensor) -> "Fp8Head":
        """Round a head [V, D], a few rows at a time: float32 copies of all of it would not fit beside it."""
        low, high = head.aminmax()
        scale = torch.maximum(-low, high).float().clamp(min=_SMALLEST_MAXIMUM) / _LARGEST
        rounded = torch.empty(head.shape, dtype=FP8, device=head.device)
        for begin in range(0, len(head), _HEAD_ROWS_AT_ONCE):
            part = slice(begin, begin + _HEAD_ROWS_AT_ONCE)
            rounded[part] = round_to(head[part], scale)
        return cls(rounded, rounded.t().contiguous(), scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] → bfloat16 [R, V]."""
        return product(quantise(hidden), Quantised(self.rounded, self.scale))

    def gradient(self, by_logits: Tensor, largest: Tensor) -> Tensor:
        """Gradient by the hidden states.

        Rows have scales of their own, which cost nothing here: they are factors of the result's rows. With them e4m3
        holds rows of any size, and a label's entry, the largest of its row, is exact.

        Args:
            by_logits: float32 [R, V].
            largest: float32 [R, 1], a bound of every row's entries, near the largest.

        Returns:
            bfloat16 [R, D].
        """
        row_scale = largest.clamp(min=_SMALLEST_MAXIMUM) / _LARGEST
        rows = Quantised(round_to(by_logits, row_scale), torch.ones_like(self.scale))
        result = product(rows, Quantised(self.transposed, self.scale))
        return (result.float() * row_scale).to(result.dtype)


def why_not(inputs: int, outputs: int) -> str | None:
    """Why a matrix [outputs, inputs] stays bfloat16; None if it does not."""
    if inputs % MULTIPLE or outputs % MULTIPLE:
        return f"{outputs} x {inputs} is not a multiple of {MULTIPLE}"
    if min(inputs, outputs) < SMALLEST_WIDTH:
        return f"{outputs} x {inputs} is narrower than {SMALLEST_WIDTH}"
    return None


class Fp8Products:
    """A drafter's linear layers and its frozen head, in FP8 wherever `why_not` allows."""

    def __init__(self, drafter: nn.Module, head: Tensor) -> None:
        """Replace the drafter's layers, whose parameters stay with their names, and round the head [V, D].

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED where the device cannot, SPEC_INVALID where there is nothing to do.
        """
        check_fp8(head.device)
        self._layers: list[Fp8Linear] = []
        self.stays_bfloat16: dict[str, str] = {}
        """Names of layers, and why."""
        for name, layer in list(drafter.named_modules()):
            if isinstance(layer, nn.Linear):
                self._replace(drafter, name, layer)
        reason = why_not(head.shape[1], head.shape[0])
        if reason is not None:
            self.stays_bfloat16["lm_head"] = reason
        self.head: Tensor | Fp8Head = Fp8Head.of(head) if reason is None else head
        if not self._layers and reason is not None:
            raise SlipstreamError(
                f"train.fp8 is true, but no layer of this drafter fits: {self._reasons()}.",
                reason=Reason.SPEC_INVALID,
                remedy=_REMEDY,
            )
        log_event(_log, "info", "fp8", layers=len(self._layers), head=reason is None, stays_bfloat16=self._reasons())

    def round_weights(self) -> None:
        """After the weights have changed: round them again, in place. Call without gradients; fit to be compiled."""
        for layer in self._layers:
            layer.refresh()

    def _replace(self, drafter: nn.Module, name: str, layer: nn.Linear) -> None:
        has_bias = len(list(layer.parameters())) > 1
        reason = "it has a bias" if has_bias else why_not(layer.in_features, layer.out_features)
        if reason is not None:
            self.stays_bfloat16[name] = reason
            return
        parent, _, child = name.rpartition(".")
        self._layers.append(Fp8Linear(drafter.get_parameter(f"{name}.weight"), forward_too=_FORWARD_TOO in name))
        setattr(drafter.get_submodule(parent), child, self._layers[-1])

    def _reasons(self) -> str:
        return ", ".join(f"{name} ({reason})" for name, reason in self.stays_bfloat16.items()) or "none"


def check_capability(capability: tuple[int, int], name: str) -> None:
    """Refuse a card whose tensor cores have no FP8.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED.
    """
    if capability < FIRST_WITH_FP8:
        found, first = ".".join(map(str, capability)), ".".join(map(str, FIRST_WITH_FP8))
        raise SlipstreamError(
            f"train.fp8 is true, but {name} has compute capability {found}; FP8 products begin with {first}.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy=_REMEDY,
        )


def check_fp8(device: torch.device) -> None:
    """Refuse a device without FP8 products; try one on any other.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED.
    """
    if device.type == "cuda":
        check_capability(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    ones = torch.eye(32, dtype=torch.bfloat16, device=device)
    try:
        scale = scale_of(ones)
        rows, columns = both_layouts(ones, scale)
        found = product(Quantised(rows, scale), Quantised(columns, scale))
    except (RuntimeError, NotImplementedError, AttributeError, ImportError) as error:
        raise SlipstreamError(
            f"train.fp8 is true, but torch {torch.__version__} has no FP8 product on {device}: {error}",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy=_REMEDY,
        ) from error
    if not torch.equal(found, ones):
        raise SlipstreamError(
            f"train.fp8 is true, but the FP8 product of torch {torch.__version__} on {device} is wrong: "
            "an identity matrix times itself is another one.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy=_REMEDY,
        )
