"""⑪ The loss over counted slots in chunks, with the head's gradient formed in the forward.

The head is frozen, so a chunk of logits is needed once: its softmax gives loss and gradient together, and the gradient
of the hidden states is two head products in all where autograd would need three. `[A·B, V]` never exists, of the
drafter or of the target.

Shapes: A anchors, B block size, S = B - 1 predicted slots, D hidden size, V vocabulary, N blocks of a chunk.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from drafter_trainer.anchors import BlockTargets
from drafter_trainer.frozen_head import FrozenHead
from drafter_trainer.objectives import SlotInput, SlotStatistics, slot_statistics
from drafter_trainer.slot_weights import decay_weights, default_decay_gamma, dpace_weights
from drafter_trainer.target_states import TargetStates
from slipstream.plan.loss_chunks import default_rows, default_rows_on_cpu, fullest_length
from slipstream.run_spec.objective import ObjectiveName
from slipstream.run_spec.spec import LossSpec

_LK_ETA = 3.0
"""The setting that the LK losses' paper recommends (arXiv 2602.23881)."""


@dataclass(frozen=True)
class LossConfig:
    """A resolved `LossSpec`. `blocks_per_chunk`: blocks whose logits exist at once, at most."""

    slot_weights: Literal["uniform", "decay", "dpace"]
    block_size: int
    blocks_per_chunk: int
    decay_gamma: float
    dpace_alpha: float
    logit_soft_cap: float | None
    only_counted_rows: bool
    """Send counted rows alone through the head: less work, but shapes that vary, so on CPU only."""
    objective: Mapping[ObjectiveName, float]
    """Names and weights; see `objectives`."""
    lk_eta: float
    fills_tiles: bool = False
    """Chunks are as long as fills a GPU's tiles best, instead of as few as possible."""


@dataclass(frozen=True)
class LossSums:
    """Sums over one pack, on its device; nothing waits for the host. A step's loss is Σ numerator / Σ weight."""

    numerator: Tensor
    """Weighted objective, float32 []; the one that carries gradients."""
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
    """What `loss_of_chunk` reads besides the head: hidden [N, S, D]; labels int64, counted bool, weights [N, S]; the
    target's hidden states [N, S, D], or None where the objective is cross-entropy alone."""

    hidden: Tensor
    labels: Tensor
    counted: Tensor
    weights: Tensor
    target: Tensor | None


class ChunkResult(NamedTuple):
    """Σ weighted objective []; its gradient [N, S, D] in the dtype of hidden; correct bool [N, S]."""

    numerator: Tensor
    gradient: Tensor
    correct: Tensor


ChunkLoss = Callable[[ChunkInput, FrozenHead, LossConfig], ChunkResult]


def resolve_loss_config(
    spec: LossSpec, *, block_size: int, vocab_size: int, logit_soft_cap: float | None, device: torch.device
) -> LossConfig:
    """Fill in what the recipe leaves open.

    The default chunk depends on the device's total memory, not on what is free, so that a resumed run sums in the same
    order: on CUDA a 64th of it, 2 GiB at most; on the CPU 64 MiB.
    """
    rows = spec.chunk_rows
    with_target = spec.needs_target_distribution
    if rows is None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        rows = default_rows(total, vocab_size, with_target=with_target)
    elif rows is None:
        rows = default_rows_on_cpu(vocab_size, with_target=with_target)
    return LossConfig(
        slot_weights=spec.slot_weights,
        block_size=block_size,
        blocks_per_chunk=max(1, rows // (block_size - 1)),
        decay_gamma=spec.decay_gamma or default_decay_gamma(block_size),
        dpace_alpha=spec.dpace_alpha,
        logit_soft_cap=logit_soft_cap,
        only_counted_rows=device.type == "cpu",
        objective=spec.objective,
        lk_eta=spec.lk_eta or _LK_ETA,
        fills_tiles=device.type == "cuda",
    )


def loss_of_chunk(chunk: ChunkInput, head: FrozenHead, config: LossConfig) -> ChunkResult:
    """Loss and gradient of whole blocks: fixed shapes, no host sync, fit to be compiled as it stands."""
    target = None if chunk.target is None else chunk.target.flatten(0, 1)
    slots = _statistics(SlotInput(chunk.hidden.flatten(0, 1), chunk.labels.flatten(), target), head, config)
    weights = final_weights(slots.cross_entropy.view_as(chunk.weights), chunk, config)
    gradient = _weighted(slots.gradient, weights.flatten()).view_as(chunk.hidden)
    numerator = (weights * slots.cost.view_as(weights)).sum()
    return ChunkResult(numerator, gradient, slots.correct.view_as(chunk.counted) & chunk.counted)


def loss_of_counted_rows(chunk: ChunkInput, head: FrozenHead, config: LossConfig) -> ChunkResult:
    """The same as `loss_of_chunk`, with counted rows alone going through the head."""
    rows = chunk.counted.flatten().nonzero()[:, 0]
    target = None if chunk.target is None else chunk.target.flatten(0, 1)[rows]
    slots = _statistics(SlotInput(chunk.hidden.flatten(0, 1)[rows], chunk.labels.flatten()[rows], target), head, config)

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(chunk.counted.numel()).index_put_((rows,), values)

    weights = final_weights(spread(slots.cross_entropy).view_as(chunk.weights), chunk, config).flatten()
    gradient = torch.zeros_like(chunk.hidden).flatten(0, 1)
    gradient[rows] = _weighted(slots.gradient, weights[rows])
    numerator = (weights * spread(slots.cost)).sum()
    return ChunkResult(numerator, gradient.view_as(chunk.hidden), spread(slots.correct).view_as(chunk.counted))


def _weighted(gradient: Tensor, weights: Tensor) -> Tensor:
    """Rows [R, D] times weights float32 [R], in the dtype of the rows."""
    return (gradient * weights[:, None]).to(gradient.dtype)


def _statistics(slots: SlotInput, head: FrozenHead, config: LossConfig) -> SlotStatistics:
    return slot_statistics(slots, head, config.logit_soft_cap, config.objective, config.lk_eta)


def final_weights(cross_entropy: Tensor, chunk: ChunkInput, config: LossConfig) -> Tensor:
    """Of every slot [N, S], from the cross-entropy [N, S] where D-PACE weighs by it."""
    if config.slot_weights == "dpace":
        return dpace_weights(cross_entropy, chunk.counted, config.dpace_alpha)
    return chunk.weights


def drafter_loss(
    hidden: Tensor,
    head: FrozenHead,
    targets: BlockTargets,
    config: LossConfig,
    chunk_loss: ChunkLoss | None = None,
    target: TargetStates | None = None,
) -> LossSums:
    """Loss and acceptance sums of one pack.

    The caller divides by the weight of the whole step: `(sums.numerator / step_weight).backward()`.

    Args:
        hidden: [A·B, D], the drafter's output.
        head: [V, D], frozen; see `FrozenHead`.
        targets: [A, B] each.
        config: see `LossConfig`.
        chunk_loss: a compiled `loss_of_chunk`; default: eager, by `config.only_counted_rows`.
        target: of this pack; None exactly where the objective is cross-entropy alone.
    """
    assert not isinstance(head, Tensor) or head.dtype == hidden.dtype, (head, hidden.dtype)
    if chunk_loss is None:
        chunk_loss = loss_of_counted_rows if config.only_counted_rows else loss_of_chunk
    counted = targets.counted[:, 1:]
    weights = _fixed_weights(config, hidden.device) * counted
    numerator, correct = _ChunkedLoss.apply(
        hidden, head, targets.labels[:, 1:], weights, counted, config, chunk_loss, target
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
    def forward(ctx: Any, hidden: Tensor, head: FrozenHead, *rest: Any) -> tuple[Tensor, Tensor]:
        labels, weights, counted, config, chunk_loss, target = rest
        blocks = hidden.detach().view(len(labels), config.block_size, -1)
        gradient = torch.zeros_like(blocks)
        numerator = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.zeros_like(counted)
        for start, done, end in block_chunks(len(labels), config):
            part = slice(start, end)
            new = counted[part].clone()
            new[:done] = False
            states = None if target is None else target.of_blocks(part)
            chunk = ChunkInput(blocks[part, 1:], labels[part], new, weights[part] * new, states)
            result = chunk_loss(chunk, head, config)
            numerator += result.numerator
            gradient[part, 1:] += result.gradient
            correct[part] |= result.correct
        ctx.save_for_backward(gradient.view_as(hidden))
        ctx.mark_non_differentiable(correct)
        return numerator, correct

    @staticmethod
    def backward(ctx: Any, by_numerator: Tensor, _by_correct: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        # In place: a second copy would exist while all activations still do. Nobody goes through here twice.
        return gradient.mul_(by_numerator), None, None, None, None, None, None, None


def _chunk_length(num_blocks: int, config: LossConfig) -> int:
    """Blocks of every chunk: as few chunks as the limit allows, or the length that fills a GPU's tiles."""
    if config.fills_tiles:
        return fullest_length(num_blocks, config.blocks_per_chunk, config.block_size - 1)
    return -(-num_blocks // -(-num_blocks // min(config.blocks_per_chunk, num_blocks)))


def block_chunks(num_blocks: int, config: LossConfig) -> list[tuple[int, int, int]]:
    """See `_chunks`, for as many blocks at once as the configuration allows."""
    return _chunks(num_blocks, _chunk_length(num_blocks, config))


def _chunks(num_blocks: int, length: int) -> list[tuple[int, int, int]]:
    """(start, blocks already done, end) of every chunk; all are equally long, so the last may overlap its neighbour."""
    begins = range(0, num_blocks, length)
    return [(start := min(begin, num_blocks - length), begin - start, start + length) for begin in begins]
