"""Loss, slot weights and acceptance against loops in float64, and the gradient's error against plain PyTorch's."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drafter_trainer.acceptance import AcceptanceMetrics, StepSums
from drafter_trainer.anchors import BlockTargets, build_block_targets, draw_anchors
from drafter_trainer.loss import (
    LossConfig,
    LossSums,
    _chunk_length,
    _chunks,
    drafter_loss,
    loss_of_chunk,
    resolve_loss_config,
)
from drafter_trainer.slot_weights import decay_weights, default_decay_gamma, dpace_weights
from slipstream.run_spec.spec import LossSpec
from tests.fakes.dense_reference import ReferenceSums, blocks_of, loss_of_blocks, slot_weight
from tests.fakes.drafter_cases import MASK_TOKEN, VOCAB, anchor_list, as_lists, packed

NUM_ANCHORS = 9
WIDTH = 12
SCHEMES = ["uniform", "decay", "dpace"]


def config_for(scheme: str, block_size: int, **changes: object) -> LossConfig:
    spec = LossSpec(slot_weights=scheme, chunk_rows=3 * (block_size - 1))
    config = resolve_loss_config(
        spec, block_size=block_size, vocab_size=VOCAB, logit_soft_cap=None, device=torch.device("cpu")
    )
    return replace(config, **changes)


def case(block_size: int, seed: int = 0) -> tuple[BlockTargets, list, Tensor, Tensor]:
    """Targets as tensors and as lists, hidden states [A·B, D], head [V, D]; the last anchors are invalid."""
    pack = packed([7, 15, 2], 24, seed=seed)
    pack["loss_mask"][13:] = 0
    pack["loss_mask"][9] = 0
    anchors = draw_anchors(pack["loss_mask"], pack["document_ids"], NUM_ANCHORS, seed, 0)
    assert anchors.valid.any() and not anchors.valid.all()
    targets = build_block_targets(pack, anchors, block_size=block_size, mask_token_id=MASK_TOKEN)
    blocks = blocks_of(as_lists(pack), anchor_list(anchors), block_size, MASK_TOKEN)
    generator = torch.Generator().manual_seed(seed)
    head = torch.randn(VOCAB, WIDTH, generator=generator)
    # Near the right rows of the head, so that some slots are right and some are wrong.
    hidden = 0.6 * head[targets.labels.flatten()] + 0.9 * torch.randn(
        targets.labels.numel(), WIDTH, generator=generator
    )
    return targets, blocks, hidden, head


def reference(blocks: list, hidden: Tensor, head: Tensor, config: LossConfig) -> ReferenceSums:
    rows = hidden.unflatten(0, (len(blocks), config.block_size))
    states = [None if block.anchor < 0 else list(rows[i]) for i, block in enumerate(blocks)]
    parameter = config.dpace_alpha if config.slot_weights == "dpace" else config.decay_gamma
    return loss_of_blocks(states, blocks, head, (config.slot_weights, parameter, config.logit_soft_cap))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("block_size", [7, 8, 16])
@pytest.mark.parametrize("only_counted", [True, False])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_sums_and_gradient_equal_the_dense_reference(
    scheme: str, block_size: int, only_counted: bool, soft_cap: float | None
) -> None:
    config = config_for(scheme, block_size, only_counted_rows=only_counted, logit_soft_cap=soft_cap)
    targets, blocks, hidden, head = case(block_size, seed=block_size)
    ours = hidden.clone().requires_grad_()
    theirs = hidden.double().requires_grad_()
    sums = drafter_loss(ours, head, targets, config)
    expected = reference(blocks, theirs, head.double(), config)
    (sums.numerator / sums.weight).backward()
    (expected.numerator / expected.weight).backward()

    assert sums.numerator.item() == pytest.approx(expected.numerator.item(), rel=1e-5)
    assert sums.weight.item() == pytest.approx(expected.weight, rel=1e-6)
    assert sums.slot_correct.tolist() == expected.correct
    assert sums.slot_count.tolist() == expected.count
    assert (sums.matched_prefix.item(), sums.blocks.item()) == (expected.matched_prefix, expected.blocks)
    assert 0 < sum(expected.correct) < sum(expected.count)
    assert (ours.grad - theirs.grad).norm() < 1e-5 * theirs.grad.norm()
    assert ours.grad.unflatten(0, (-1, block_size))[~targets.counted].count_nonzero() == 0


def plain_gradient(hidden: Tensor, head: Tensor, targets: BlockTargets, weights: Tensor) -> Tensor:
    """What a straightforward PyTorch implementation in the same precision computes."""
    rows = hidden.detach().clone().requires_grad_()
    logits = functional.linear(rows, head)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = functional.cross_entropy(logits, targets.labels.flatten(), reduction="none")
    ((losses * weights).sum() / weights.sum()).backward()
    return rows.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("only_counted", [True, False])
def test_the_gradients_error_is_not_above_plain_pytorch(dtype: torch.dtype, only_counted: bool) -> None:
    config = config_for("decay", 8, only_counted_rows=only_counted)
    generator = torch.Generator().manual_seed(5)
    head = torch.randn(2000, 64, generator=generator).to(dtype)
    labels = torch.randint(0, 2000, (48, 8), generator=generator)
    counted = (torch.arange(8) > 0).expand(48, 8)
    targets = BlockTargets(labels, labels, labels, counted)
    hidden = (0.1 * head[labels.flatten()].float() + 0.2 * torch.randn(384, 64, generator=generator)).to(dtype)
    weights = (functional.pad(decay_weights(8, config.decay_gamma), (1, 0)) * counted).flatten()
    exact = plain_gradient(hidden.double(), head.double(), targets, weights.double())

    rows = hidden.clone().requires_grad_()
    sums = drafter_loss(rows, head, targets, config)
    (sums.numerator / sums.weight).backward()
    error = (rows.grad.double() - exact).norm()
    plain_error = (plain_gradient(hidden, head, targets, weights).double() - exact).norm()
    assert error <= 1.2 * plain_error


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 4, 9, 50])
def test_chunks_change_nothing(scheme: str, blocks_per_chunk: int) -> None:
    targets, _, hidden, head = case(8)
    whole, chunked = (hidden.clone().requires_grad_() for _ in range(2))
    first = drafter_loss(whole, head, targets, config_for(scheme, 8, blocks_per_chunk=NUM_ANCHORS))
    second = drafter_loss(chunked, head, targets, config_for(scheme, 8, blocks_per_chunk=blocks_per_chunk))
    for sums in (first, second):
        (sums.numerator * 0.25).backward()
    torch.testing.assert_close(whole.grad, chunked.grad)
    torch.testing.assert_close(StepSums.of(first).values, StepSums.of(second).values)


def test_chunks_are_equally_long_and_never_hold_all_rows() -> None:
    targets, _, hidden, head = case(8)
    seen = []

    def spy(chunk, head_weight, config):  # type: ignore[no-untyped-def]
        seen.append(chunk.hidden.shape)
        return loss_of_chunk(chunk, head_weight, config)

    drafter_loss(hidden, head, targets, config_for("dpace", 8, blocks_per_chunk=4), spy)
    assert seen == [(3, 7, WIDTH)] * 3
    seen.clear()
    drafter_loss(hidden, head, targets, config_for("dpace", 8, blocks_per_chunk=2), spy)
    assert seen == [(2, 7, WIDTH)] * 5


def test_no_counted_slot_gives_zero_and_a_zero_gradient() -> None:
    targets, _, hidden, head = case(8)
    nothing = targets._replace(counted=torch.zeros_like(targets.counted))
    for only_counted in (True, False):
        rows = hidden.clone().requires_grad_()
        sums = drafter_loss(rows, head, nothing, config_for("decay", 8, only_counted_rows=only_counted))
        sums.numerator.backward()
        assert StepSums.of(sums).values.count_nonzero() == 0
        assert rows.grad.count_nonzero() == 0
        assert AcceptanceMetrics.of(StepSums.of(sums)).loss == 0.0


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (7, 3.5)])
def test_decay(block_size: int, gamma: float) -> None:
    assert default_decay_gamma(block_size) == gamma
    expected = [slot_weight("decay", gamma, k, []) for k in range(1, block_size)]
    assert decay_weights(block_size, gamma).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("slots", [6, 7, 15])
def test_dpace_weights_equal_the_formula(alpha: float, slots: int) -> None:
    generator = torch.Generator().manual_seed(slots)
    losses = torch.rand(12, slots, generator=generator) * 3
    counted = torch.arange(slots) < torch.randint(0, slots + 1, (12, 1), generator=generator)
    weights = dpace_weights(losses, counted, alpha)
    for row in range(12):
        values = [None, *(v if c else None for v, c in zip(losses[row].tolist(), counted[row].tolist(), strict=True))]
        expected = [slot_weight("dpace", alpha, k, values) if counted[row, k - 1] else 0.0 for k in range(1, slots + 1)]
        assert weights[row].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_dpace_of_sure_slots_counts_what_follows() -> None:
    weights = dpace_weights(torch.zeros(1, 4), torch.tensor([[True, True, True, False]]), 0.5)
    assert weights.tolist() == [[3.0, 2.0, 1.0, 0.0]]


def test_metrics_of_a_step_are_pooled_over_its_packs() -> None:
    def sums(numerator: float, weight: float, correct: list[float], count: list[float], matched: float) -> LossSums:
        tensors = [torch.tensor(v) for v in (numerator, weight, correct, count, matched, count[0])]
        return LossSums(*tensors)

    first = sums(6.0, 4.0, [2.0, 0.0], [3.0, 1.0], 2.0)
    second = sums(2.0, 1.0, [1.0, 1.0], [1.0, 1.0], 2.0)
    metrics = AcceptanceMetrics.of(StepSums.of(first) + StepSums.of(second))
    assert metrics.loss == pytest.approx(8 / 5)
    assert (metrics.blocks, metrics.mean_matched_prefix) == (4, 1.0)
    assert metrics.slot_accuracy == (0.75, 0.5)


def test_default_chunk_bounds_the_logits() -> None:
    config = resolve_loss_config(
        LossSpec(), block_size=8, vocab_size=49152, logit_soft_cap=None, device=torch.device("cpu")
    )
    assert config.blocks_per_chunk * 7 * 49152 * 8 <= 64 << 20 < (config.blocks_per_chunk + 1) * 7 * 49152 * 8
    assert math.isclose(config.decay_gamma, 4.0)


@pytest.mark.parametrize(
    ("blocks", "block_size", "most", "expected"),
    [
        (512, 16, 235, 128),  # 1920 rows are 15 tiles: nothing is computed in vain
        (1024, 32, 69, 41),  # 1271 rows in 10 tiles, the last chunk overlaps by a block
        (1024, 16, 728, 512),
        (512, 16, 4, 4),
        (5, 16, 728, 5),
    ],
)
def test_chunks_fill_the_tiles_of_a_gpu(blocks: int, block_size: int, most: int, expected: int) -> None:
    config = replace(config_for("decay", block_size, blocks_per_chunk=most), fills_tiles=True)
    assert _chunk_length(blocks, config) == expected
    parts = _chunks(blocks, expected)
    assert [end - start for start, _, end in parts] == [expected] * len(parts)
    assert sum(end - start - done for start, done, end in parts) == blocks
