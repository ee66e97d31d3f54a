"""Step 11 of a pack's path: cross-entropy over counted slots in chunks, with the head's gradient formed in the forward.

The head is frozen, so a chunk of logits is needed once: its softmax gives loss and gradient together, and the gradient
of the hidden states is two head products in all where autograd would need three. `[A·B, V]` never exists.

Shapes: A anchors, B block size, S = B - 1 predicted slots, D hidden size, V vocabulary, N blocks of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from drafter_trainer.anchors import BlockTargets
from drafter_trainer.slot_weights import decay_weights, default_decay_gamma, dpace_weights
from slipstream.run_spec.spec import LossSpec

_CPU_LOGITS_BYTES = 64 << 20
_CUDA_LOGITS_BYTES = 2 << 30
_CUDA_LOGITS_SHARE = 64
_BYTES_PER_LOGIT = 8
"""Logits and their gradient at once, with what the softmax needs besides."""


@dataclass(frozen=True)
class LossConfig:
    """A resolved `LossSpec`. `blocks_per_chunk`: blocks whose logits exist at once."""

    slot_weights: Literal["uniform", "decay", "dpace"]
    block_size: int
    blocks_per_chunk: int
    decay_gamma: float
    dpace_alpha: float
    logit_soft_cap: float | None
    only_counted_rows: bool
    """Send counted rows alone through the head: less work, but shapes that vary, so on CPU only."""


@dataclass(frozen=True)
class LossSums:
    """Sums over one pack, on its device; nothing waits for the host. A step's loss is Σ numerator / Σ weight."""

    numerator: Tensor
    """Weighted cross-entropy, float32 []; the one that carries gradients."""
    weight: Tensor
    """Σ of the slot weights (dpace: number of counted slots), float32 []."""
    slot_correct: Tensor
    """Counted slots whose most likely token is the recorded one, float32 [S]."""
    slot_count: Tensor
    """Counted slots, float32 [S]."""
    matched_prefix: Tensor
    """Σ over blocks of the leading correct slots, float32 []."""
    blocks: Tensor
    """Valid anchors, float32 []."""


class ChunkInput(NamedTuple):
    """What `loss_of_chunk` reads besides the head: hidden [N, S, D]; labels int64, counted bool, weights [N, S]."""

    hidden: Tensor
    labels: Tensor
    counted: Tensor
    weights: Tensor


class ChunkResult(NamedTuple):
    """Σ weighted cross-entropy []; its gradient [N, S, D] in the dtype of hidden; correct bool [N, S]."""

    numerator: Tensor
    gradient: Tensor
    correct: Tensor


ChunkLoss = Callable[[ChunkInput, Tensor, LossConfig], ChunkResult]


def resolve_loss_config(
    spec: LossSpec, *, block_size: int, vocab_size: int, logit_soft_cap: float | None, device: torch.device
) -> LossConfig:
    """Fill in what the recipe leaves open.

    The default chunk depends on the device's total memory, not on what is free, so that a resumed run sums in the same
    order: on CUDA a 64th of it, 2 GiB at most; on the CPU 64 MiB.
    """
    rows = spec.chunk_rows
    if rows is None:
        budget = _CPU_LOGITS_BYTES
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            budget = min(_CUDA_LOGITS_BYTES, total // _CUDA_LOGITS_SHARE)
        rows = budget // (_BYTES_PER_LOGIT * vocab_size)
    return LossConfig(
        slot_weights=spec.slot_weights,
        block_size=block_size,
        blocks_per_chunk=max(1, rows // (block_size - 1)),
        decay_gamma=spec.decay_gamma or default_decay_gamma(block_size),
        dpace_alpha=spec.dpace_alpha,
        logit_soft_cap=logit_soft_cap,
        only_counted_rows=device.type == "cpu",
    )


def loss_of_chunk(chunk: ChunkInput, head_weight: Tensor, config: LossConfig) -> ChunkResult:
    """Loss and gradient of whole blocks: fixed shapes, no host sync, fit to be compiled as it stands."""
    cross_entropy, correct, gradient_of = _softmax_statistics(
        chunk.hidden.flatten(0, 1), chunk.labels.flatten(), head_weight, config.logit_soft_cap
    )
    cross_entropy = cross_entropy.view_as(chunk.weights)
    weights = _final_weights(cross_entropy, chunk, config)
    gradient = gradient_of(weights.flatten()).view_as(chunk.hidden)
    return ChunkResult((weights * cross_entropy).sum(), gradient, correct.view_as(chunk.counted) & chunk.counted)


def loss_of_counted_rows(chunk: ChunkInput, head_weight: Tensor, config: LossConfig) -> ChunkResult:
    """The same as `loss_of_chunk`, with counted rows alone going through the head."""
    rows = chunk.counted.flatten().nonzero()[:, 0]
    row_cross_entropy, row_correct, gradient_of = _softmax_statistics(
        chunk.hidden.flatten(0, 1)[rows], chunk.labels.flatten()[rows], head_weight, config.logit_soft_cap
    )
    cross_entropy = row_cross_entropy.new_zeros(chunk.counted.numel())
    cross_entropy[rows] = row_cross_entropy
    weights = _final_weights(cross_entropy.view_as(chunk.weights), chunk, config).flatten()
    gradient = torch.zeros_like(chunk.hidden).flatten(0, 1)
    gradient[rows] = gradient_of(weights[rows])
    correct = torch.zeros_like(chunk.counted).flatten()
    correct[rows] = row_correct
    return ChunkResult((weights * cross_entropy).sum(), gradient.view_as(chunk.hidden), correct.view_as(chunk.counted))


def _softmax_statistics(
    hidden: Tensor, labels: Tensor, head_weight: Tensor, soft_cap: float | None
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Cross-entropy float32 [R], correctness bool [R], and row weights [R] → gradient of Σ weight·CE [R, D]."""
    logits = (hidden @ head_weight.t()).float()
    slope = None
    if soft_cap is not None:
        bounded = logits.div_(soft_cap).tanh_()
        slope = 1.0 - bounded * bounded
        logits = bounded.mul_(soft_cap)
    top, guess = logits.max(dim=-1, keepdim=True)
    picked = logits.gather(1, labels[:, None]) - top
    # In place: eager passes over [R, V] cost as much as the products; a compiled chunk fuses them either way.
    others = _put(logits.sub_(top).exp_(), labels, torch.zeros_like(top))
    # The label's p - 1 is minus what the others have: where p is nearly 1, the difference would lose its digits.
    rest = others.sum(dim=-1, keepdim=True)
    total = rest + picked.exp()

    def gradient_of(weights: Tensor) -> Tensor:
        scale = weights[:, None] / total
        by_logits = _put(others.mul_(scale), labels, -rest * scale)
        if slope is not None:
            by_logits = by_logits.mul_(slope)
        return by_logits.to(hidden.dtype) @ head_weight

    return (total.log() - picked)[:, 0], guess[:, 0] == labels, gradient_of


def _put(values: Tensor, columns: Tensor, entries: Tensor) -> Tensor:
    """values[r, columns[r]] = entries[r, 0]. Compiled, a comparison fuses where a scatter writes [R, V] once more."""
    if torch.compiler.is_compiling():
        at_column = torch.arange(values.shape[1], device=values.device) == columns[:, None]
        return torch.where(at_column, entries, values)
    return values.scatter_(1, columns[:, None], entries)


def _final_weights(cross_entropy: Tensor, chunk: ChunkInput, config: LossConfig) -> Tensor:
    if config.slot_weights == "dpace":
        return dpace_weights(cross_entropy, chunk.counted, config.dpace_alpha)
    return chunk.weights


def drafter_loss(
    hidden: Tensor,
    head_weight: Tensor,
    targets: BlockTargets,
    config: LossConfig,
    chunk_loss: ChunkLoss | None = None,
) -> LossSums:
    """Loss and acceptance sums of one pack.

    The caller divides by the weight of the whole step: `(sums.numerator / step_weight).backward()`.

    Args:
        hidden: [A·B, D], the drafter's output.
        head_weight: [V, D], frozen, in the dtype of `hidden`.
        targets: [A, B] each.
        config: see `LossConfig`.
        chunk_loss: a compiled `loss_of_chunk`; default: eager, by `config.only_counted_rows`.
    """
    assert head_weight.dtype == hidden.dtype, (head_weight.dtype, hidden.dtype)
    if chunk_loss is None:
        chunk_loss = loss_of_counted_rows if config.only_counted_rows else loss_of_chunk
    counted = targets.counted[:, 1:]
    weights = _fixed_weights(config, hidden.device) * counted
    numerator, correct = _ChunkedLoss.apply(
        hidden, head_weight, targets.labels[:, 1:], weights, counted, config, chunk_loss
    )
    slot_count = counted.float().sum(dim=0)
    return LossSums(
        numerator=numerator,
        weight=weights.sum(),
        slot_correct=correct.float().sum(dim=0),
        slot_count=slot_count,
        matched_prefix=correct.float().cumprod(dim=1).sum(),
        blocks=slot_count[0],
    )


def _fixed_weights(config: LossConfig, device: torch.device) -> Tensor:
    if config.slot_weights == "decay":
        return decay_weights(config.block_size, config.decay_gamma, device)
    return torch.ones(config.block_size - 1, device=device)


class _ChunkedLoss(torch.autograd.Function):
    """The loop over chunks; the gradient by hidden is complete when the forward ends."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head_weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        labels, weights, counted, config, chunk_loss = rest
        blocks = hidden.detach().view(len(labels), config.block_size, -1)
        gradient = torch.zeros_like(blocks)
        numerator = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.zeros_like(counted)
        for start, done, end in _chunks(len(labels), config.blocks_per_chunk):
            part = slice(start, end)
            new = counted[part].clone()
            new[:done] = False
            chunk = ChunkInput(blocks[part, 1:], labels[part], new, weights[part] * new)
            result = chunk_loss(chunk, head_weight, config)
            numerator += result.numerator
            gradient[part, 1:] += result.gradient
            correct[part] |= result.correct
        ctx.save_for_backward(gradient.view_as(hidden))
        ctx.mark_non_differentiable(correct)
        return numerator, correct

    @staticmethod
    def backward(ctx: Any, by_numerator: Tensor, _by_correct: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * by_numerator).to(gradient.dtype), None, None, None, None, None, None


def _chunks(num_blocks: int, most_blocks: int) -> list[tuple[int, int, int]]:
    """(start, blocks already done, end) of every chunk; all are equally long, so the last may overlap its neighbour."""
    num_chunks = -(-num_blocks // most_blocks)
    length = -(-num_blocks // num_chunks)
    begins = range(0, num_blocks, length)
    return [(start := min(begin, num_blocks - length), begin - start, start + length) for begin in begins]
