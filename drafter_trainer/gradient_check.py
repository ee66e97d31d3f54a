"""Are the compiled drafter's gradients right on this card? Its own graphs against dense attention, on a few blocks.

A block sees the context before its anchor and itself, nothing of another block. So what reaches the weights from the
rows of a few blocks is a function of these blocks and of the context that they see: the compiled function runs in its
declared shape and gets a gradient that is zero in all other rows, the reference runs on those rows alone. Nothing is
approximated but by rounding, and the reference is small whatever the pack is.

What rounding may cost is measured, not guessed: by plain PyTorch in the same precision, on the same rows.

Shapes: T context tokens of the pack, t of them in the slice, A anchors, a of them in the slice, B block size.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from drafter_trainer.anchors import Anchors, BlockTargets, build_block_targets
from drafter_trainer.block_mask import BlockAttention, build_block_attention
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.step import TrainingStep
from drafter_trainer.training_packs import TrainingPack
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_MOST_ANCHORS = 4
_EXPECTED = 1.2
"""Times the error of plain PyTorch in the same precision; beyond it is a warning. A right kernel has 0.9 to 1.1 times
it (H200, and a CPU with flex_attention's rounding emulated)."""
_ALLOWED = 2.0
"""Times that error; beyond it a kernel is wrong. One that sees a key too many has seventy times it, one whose backward
is a tenth off, ten times."""
_DEVIATIONS = 4.0
"""An error estimated from n entries is known to 1/√(2n) of itself; a ratio of two, to 1/√n. So many of these are
allowed on top, which only the norms, of some 64 gains each, come to feel."""
_EXACT = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
_FLOOR = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-12}
"""Relative errors that are never wrong: what rounding a gradient to bfloat16 costs; for float32, where kernels may sum
in any order and use the fast exponential, half of TF32's."""
_REMEDY = (
    "Nothing was trained. A kernel of this torch is wrong for this GPU, head size or mask: install another torch "
    "release, empty the compile cache, and report what slipstream doctor prints."
)
_ALLOWED_IN_FP8 = 0.5
"""Relative error. A fifth is what rounding to three bits costs a deep drafter; a kernel that is wrong is off by one."""
_MEMORY_SHARE = 32
"""Of the device's memory, for the reference's context."""


@dataclass(frozen=True)
class _Slice:
    """The arguments of the drafter for a few blocks: `features` [t, n·D], `block_ids` and `block_positions` [a, B],
    `positions` [t], `anchors` [a] as rows of the slice; `rows` bool [A·B]: which rows of the pack's blocks they are."""

    features: Tensor
    block_ids: Tensor
    positions: Tensor
    block_positions: Tensor
    anchors: Anchors
    rows: Tensor


@dataclass(frozen=True)
class GradientErrors:
    """Relative errors by norm over all packs that were compared, by parameter; "hidden states" is the output itself.
    `expected` and `allowed`: what ours should and must not exceed."""

    ours: Mapping[str, float]
    plain: Mapping[str, float]
    expected: Mapping[str, float]
    allowed: Mapping[str, float]

    @property
    def wrong(self) -> list[str]:
        """Names whose error is larger than allowed, or not a number, worst first."""
        found = [name for name, error in self.ours.items() if not error <= self.allowed[name]]
        return sorted(found, key=self._excess, reverse=True)

    @property
    def unexpected(self) -> list[str]:
        """Names whose error is larger than expected, wrong ones included."""
        return [name for name, error in self.ours.items() if not error <= self.expected[name]]

    def worst(self) -> str:
        """The name that is nearest to its bound, or furthest beyond it."""
        return max(self.ours, key=self._excess)

    def in_words(self, name: str) -> str:
        """One name's numbers."""
        return (
            f"{name}: error {self.ours[name]:.2e}, plain PyTorch {self.plain[name]:.2e}, "
            f"allowed {self.allowed[name]:.2e}"
        )

    def _excess(self, name: str) -> float:
        ratio = self.ours[name] / self.allowed[name]
        return ratio if math.isfinite(ratio) else math.inf


class GradientCheck:
    """Sums squared errors over packs. The step's master weights must be numbers of its compute precision."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._parameters = dict(step.drafter.named_parameters())
        self._dtype = next(iter(self._parameters.values())).dtype
        with torch.device("meta"):
            # A module of its own, filled at each call: the step's may compute some products in a lower precision.
            self._exact = step.drafter.config.build()
        # By name: Σ |ours - exact|², Σ |plain - exact|², Σ |exact|², packs where exact is not zero.
        zeros = functools.partial(torch.zeros, 4, dtype=torch.float64, device=step.device)
        self._sums = {name: zeros() for name in ("hidden states", *self._parameters)}

    def add(self, pack: TrainingPack) -> None:
        """Compare one pack, which must be on the step's device. Runs the compiled function once, with its backward."""
        targets = self._step.block_targets(pack)
        self._require_same_targets(pack, targets)
        part = self._slice(pack, targets)
        width = self._exact.config.hidden_size
        generator = torch.Generator().manual_seed(pack.sequence_number)
        direction = torch.randn(len(part.anchors.valid), self._exact.config.block_size, width, generator=generator)
        direction = direction.to(self._step.device, self._dtype) * part.anchors.valid[:, None, None]
        hidden = self._step.hidden_states(pack, targets)
        outside = torch.zeros_like(hidden, requires_grad=False)
        outside[part.rows] = direction.flatten(0, 1)
        ours = torch.autograd.grad(hidden, list(self._parameters.values()), outside)
        counted = part.anchors.valid[:, None, None].expand_as(direction).flatten(0, 1)
        our_output = hidden.detach()[part.rows] * counted
        del hidden, outside

        # The run's own module, so that products in FP8 are compared with products in FP8.
        output = self._step.drafter(*self._arguments(part, self._dtype))
        plain = torch.autograd.grad(output, list(self._parameters.values()), direction.flatten(0, 1))
        plain_output = output.detach() * counted
        del output

        exact_leaves = self._exact_leaves(ours, plain)
        output = functional_call(self._exact, exact_leaves, self._arguments(part, _EXACT[self._dtype]))
        self._compare("hidden states", (our_output, plain_output), output.detach() * counted)
        # Every gradient is compared and dropped as soon as it is there: float32 gradients of all weights never exist.
        output.backward(direction.flatten(0, 1).to(output.dtype))

    def errors(self) -> GradientErrors:
        """What was found so far."""
        ours, plain, expected, allowed = {}, {}, {}, {}
        for name, sums in self._sums.items():
            of_ours, of_plain, norm, packs = sums.tolist()
            if norm == 0.0 and of_ours == 0.0:
                continue
            entries = packs * (self._parameters[name].numel() if name in self._parameters else 1 << 20)
            ours[name] = math.sqrt(of_ours / norm) if norm else math.inf
            plain[name] = math.sqrt(of_plain / norm) if norm else 0.0
            slack = 1.0 + _DEVIATIONS / math.sqrt(max(1.0, entries))
            floor = _ALLOWED_IN_FP8 if self._step.in_fp8 else _FLOOR[self._dtype]
            expected[name] = max(_EXPECTED * slack * plain[name], floor)
            allowed[name] = max(_ALLOWED * slack * plain[name], floor)
        return GradientErrors(ours, plain, expected, allowed)

    def require_right(self) -> GradientErrors:
        """`errors`, if none is larger than it may be.

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED, a compiled kernel is wrong on this card.
        """
        errors = self.errors()
        if wrong := errors.wrong:
            raise SlipstreamError(
                f"The compiled drafter's gradients are wrong on this machine, compared with dense attention: "
                f"{len(wrong)} of {len(errors.ours)} tensors, worst {'; '.join(map(errors.in_words, wrong[:3]))}.",
                reason=Reason.ENVIRONMENT_UNSUPPORTED,
                remedy=_REMEDY,
            )
        return errors

    def _require_same_targets(self, pack: TrainingPack, targets: BlockTargets) -> None:
        """What a compiled function laid out, against the same integers one operation at a time."""
        config = self._exact.config
        plain = build_block_targets(
            pack.tensors, pack.anchors, block_size=config.block_size, mask_token_id=config.mask_token_id
        )
        pairs = zip(plain._fields, plain, targets, strict=True)
        wrong = [name for name, expected, found in pairs if not torch.equal(expected, found)]
        if wrong:
            raise SlipstreamError(
                f"The compiled layout of a pack's blocks is wrong on this machine: {', '.join(wrong)} differ from what "
                "the same code gives uncompiled.",
                reason=Reason.ENVIRONMENT_UNSUPPORTED,
                remedy=_REMEDY,
            )

    def _exact_leaves(self, ours: Sequence[Tensor], plain: Sequence[Tensor]) -> dict[str, Tensor]:
        """The master weights as leaves; the backward compares each gradient and lets it go."""
        leaves = {}
        for name, our_gradient, plain_gradient in zip(self._parameters, ours, plain, strict=True):
            leaf = self._step.optimizer.weights()[name].to(_EXACT[self._dtype]).detach().requires_grad_()

            found = (our_gradient, plain_gradient)
            leaf.register_post_accumulate_grad_hook(functools.partial(self._compare_and_drop, name, found))
            leaves[name] = leaf
        return leaves

    def _compare_and_drop(self, name: str, found: tuple[Tensor, Tensor], leaf: Tensor) -> None:
        assert leaf.grad is not None
        self._compare(name, found, leaf.grad)
        leaf.grad = None

    def _compare(self, name: str, found: tuple[Tensor, Tensor], exact: Tensor) -> None:
        norm = exact.square().sum()
        errors = [(tensor.to(exact.dtype) - exact).square().sum() for tensor in found]
        self._sums[name] += torch.stack((*errors, norm, (norm > 0).to(norm.dtype))).double()

    def _arguments(self, part: _Slice, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, BlockAttention]:
        """Of the drafter; attention by SDPA with the mask of the same mask_mod."""
        attention = build_block_attention(self._exact.attention_layout("sdpa"), part.anchors, part.positions)
        embeddings = self._step.frozen.embed(part.block_ids.flatten())
        positions = part.block_positions.flatten()
        return part.features.to(dtype), embeddings.to(dtype), part.positions, positions, attention

    def _slice(self, pack: TrainingPack, targets: BlockTargets) -> _Slice:
        """A few anchors from the first to the last, and the documents' tokens up to them: a pack of its own."""
        positions = pack.tensors["position_ids"].long()
        chosen = self._choose(pack.anchors, positions)
        anchor = pack.anchors.positions[chosen]
        kept = torch.zeros_like(positions, dtype=torch.bool)
        for last, depth in zip(anchor.tolist(), positions[anchor].tolist(), strict=True):
            kept[last - depth : last + 1] = True
        row = kept.cumsum(0) - 1
        rows = torch.zeros_like(targets.block_ids, dtype=torch.bool)
        rows[chosen] = True
        return _Slice(
            features=self._step.features(pack)[kept],
            block_ids=targets.block_ids[chosen],
            positions=pack.tensors["position_ids"][kept],
            block_positions=targets.block_positions[chosen],
            anchors=Anchors(row[anchor], pack.anchors.valid[chosen]),
            rows=rows.flatten(),
        )

    def _choose(self, anchors: Anchors, positions: Tensor) -> Tensor:
        """Ascending indices of a few anchors, spread over those that are valid, whose context the reference can hold;
        of invalid ones where none is valid."""
        most = self._most_context()
        depth = positions[anchors.positions]
        candidates = (anchors.valid & (depth < most)).nonzero()[:, 0]
        if len(candidates) == 0:
            return torch.zeros(1, dtype=torch.int64, device=positions.device)
        spread = torch.linspace(0, len(candidates) - 1, _MOST_ANCHORS, device=positions.device).round().long().unique()
        chosen = candidates[spread]
        while len(chosen) > 1 and int(depth[chosen].sum()) > most * 2:
            chosen = chosen[:-1]
        return chosen

    def _most_context(self) -> int:
        """Tokens whose features, keys and values the reference may hold, with their gradients."""
        if self._step.device.type != "cuda":
            return 1 << 30
        memory = torch.cuda.get_device_properties(self._step.device).total_memory // _MEMORY_SHARE
        return max(512, memory // (_EXACT[self._dtype].itemsize * _numbers_per_token(self._exact.config)))


def _numbers_per_token(config: DrafterConfig) -> int:
    """Of the reference, roughly: features and their gradient, the projection, and what a layer keeps of it."""
    return (2 * config.num_features + 6) * config.hidden_size + 4 * config.context_width
