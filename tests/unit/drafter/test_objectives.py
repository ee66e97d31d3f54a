"""Every objective in chunks against a plain unchunked one in float64: value, gradient, corners, graphs.

How close is close enough: the float64 result is the truth, and the error must not exceed that of a plain float32
implementation with autograd by more than a fifth (plus what float32 itself cannot resolve).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drafter_trainer import objectives
from drafter_trainer.acceptance import StepSums
from drafter_trainer.anchors import Anchors, BlockTargets
from drafter_trainer.flex_policy import compiled_graphs
from drafter_trainer.loss import LossConfig, LossSums, drafter_loss, loss_of_chunk, resolve_loss_config
from drafter_trainer.slot_weights import decay_weights
from drafter_trainer.target_states import TargetStates, target_states
from slipstream.run_spec.objective import ObjectiveName
from slipstream.run_spec.spec import LossSpec

CPU = torch.device("cpu")
BLOCKS, BLOCK_SIZE, WIDTH, VOCAB, TOKENS = 9, 6, 16, 101, 40
SOFT = [name for name in get_args(ObjectiveName) if name != "cross_entropy"]
MIXES = [*SOFT, {"cross_entropy": 0.5, "tv": 0.5}, {"kl": 0.3, "reverse_kl": 0.2, "js": 2.0, "lk_hybrid": 0.7}]
Mix = str | dict[str, float]


def config_for(objective: Mix, scheme: str = "decay", **changes: object) -> LossConfig:
    # Blocks of two in a chunk: nine blocks do not divide, and neither does the vocabulary by anything.
    spec = LossSpec(objective=objective, slot_weights=scheme, chunk_rows=2 * (BLOCK_SIZE - 1))
    config = resolve_loss_config(spec, block_size=BLOCK_SIZE, vocab_size=VOCAB, logit_soft_cap=None, device=CPU)
    return replace(config, **changes)


class Case:
    """Blocks with padding and uncounted slots, hidden states of drafter and target, and a head."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.head = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype)
        positions = torch.randint(0, TOKENS, (BLOCKS,), generator=generator).sort().values
        # The last anchor stands at the end of the pack, where its slots have no row of their own.
        positions[-1] = TOKENS - 1
        self.anchors = Anchors(positions, torch.arange(BLOCKS) < BLOCKS - 1)
        last = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
        norm = torch.rand(WIDTH, generator=generator) + 0.5
        self.target = target_states(last, self.anchors, BLOCK_SIZE, (norm, 1e-5), dtype)
        labels = torch.randint(0, VOCAB, (BLOCKS, BLOCK_SIZE), generator=generator)
        reach = torch.randint(0, BLOCK_SIZE, (BLOCKS, 1), generator=generator)
        reach[0], reach[1] = BLOCK_SIZE - 1, 0
        slots = torch.arange(BLOCK_SIZE)
        counted = (slots > 0) & (slots <= reach) & self.anchors.valid[:, None]
        self.targets = BlockTargets(labels, labels, labels, counted)
        own = torch.randn(BLOCKS, BLOCK_SIZE, WIDTH, generator=generator).to(dtype)
        own[:, 1:] += self.target.of_blocks(slice(None))
        self.hidden = own.flatten(0, 1)


def plain_costs(objective: Mix, target_logits: Tensor, logits: Tensor, labels: Tensor, eta: float = 3.0) -> Tensor:
    """The definitions, [R], for autograd, in the precision of the arguments."""
    p, q = target_logits.softmax(-1), logits.softmax(-1)
    log_p, log_q = target_logits.log_softmax(-1), logits.log_softmax(-1)
    middle = torch.logaddexp(log_p, log_q) - math.log(2.0)
    kl = (p * (log_p - log_q)).sum(-1)
    tv = 0.5 * (p - q).abs().sum(-1)
    share = torch.exp(-eta * (1.0 - tv)).detach()
    costs = {
        "cross_entropy": functional.cross_entropy(logits, labels, reduction="none"),
        "kl": kl,
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "js": 0.5 * (p * (log_p - middle)).sum(-1) + 0.5 * (q * (log_q - middle)).sum(-1),
        "tv": tv,
        "lk_hybrid": share * kl + (1.0 - share) * tv,
    }
    mix = {objective: 1.0} if isinstance(objective, str) else objective
    return sum((weight * costs[name] for name, weight in mix.items()), torch.zeros(()))


def plain_loss(case: Case, objective: Mix, dtype: torch.dtype, soft_cap: float | None = None) -> tuple[Tensor, Tensor]:
    """Σ decay-weighted cost of the counted slots, and its gradient; [A·B, V] at once."""
    rows = case.hidden.detach().to(dtype).requires_grad_()
    counted = case.targets.counted[:, 1:]
    head = case.head.to(dtype)
    logits = rows.unflatten(0, (BLOCKS, BLOCK_SIZE))[:, 1:][counted] @ head.t()
    target_logits = case.target.of_blocks(slice(None))[counted].to(dtype) @ head.t()
    if soft_cap is not None:
        logits, target_logits = (soft_cap * torch.tanh(x / soft_cap) for x in (logits, target_logits))
    weights = decay_weights(BLOCK_SIZE, config_for(objective).decay_gamma).expand(counted.shape)[counted].to(dtype)
    costs = plain_costs(objective, target_logits, logits, case.targets.labels[:, 1:][counted])
    loss = (weights * costs).sum()
    loss.backward()
    assert rows.grad is not None
    return loss.detach(), rows.grad


def ours(case: Case, config: LossConfig, chunk_loss: object = None) -> tuple[LossSums, Tensor]:
    rows = case.hidden.clone().requires_grad_()
    sums = drafter_loss(rows, case.head, case.targets, config, chunk_loss, case.target)  # type: ignore[arg-type]
    sums.numerator.backward()
    assert rows.grad is not None
    return sums, rows.grad


@pytest.mark.parametrize("objective", MIXES, ids=str)
@pytest.mark.parametrize("only_counted", [True, False])
@pytest.mark.parametrize("soft_cap", [None, 4.0])
def test_value_and_gradient_are_as_exact_as_plain_float32(
    objective: Mix, only_counted: bool, soft_cap: float | None
) -> None:
    config = config_for(objective, only_counted_rows=only_counted, logit_soft_cap=soft_cap)
    for seed in range(3):
        case = Case(seed)
        sums, gradient = ours(case, config)
        exact, exact_gradient = plain_loss(case, objective, torch.float64, soft_cap)
        plain, plain_gradient = plain_loss(case, objective, torch.float32, soft_cap)
        resolution = 4 * torch.finfo(torch.float32).eps
        error, plain_error = (gradient - exact_gradient).norm(), (plain_gradient - exact_gradient).norm()
        assert error <= 1.2 * plain_error + resolution * exact_gradient.norm()
        assert (sums.numerator - exact).abs() <= 1.2 * (plain - exact).abs() + resolution * exact
        assert gradient.unflatten(0, (-1, BLOCK_SIZE))[~case.targets.counted].count_nonzero() == 0
        assert exact_gradient.norm() > 0.01


@pytest.mark.parametrize("objective", MIXES, ids=str)
def test_bfloat16_is_as_exact_as_plain_pytorch_in_bfloat16(objective: Mix) -> None:
    case = Case(1, torch.bfloat16)
    _, gradient = ours(case, config_for(objective))
    _, exact = plain_loss(case, objective, torch.float64)
    rows = case.hidden.detach().clone().requires_grad_()
    counted = case.targets.counted[:, 1:]
    logits = (rows.unflatten(0, (BLOCKS, BLOCK_SIZE))[:, 1:][counted] @ case.head.t()).float()
    target_logits = (case.target.of_blocks(slice(None))[counted] @ case.head.t()).float()
    weights = decay_weights(BLOCK_SIZE, config_for(objective).decay_gamma).expand(counted.shape)[counted]
    costs = plain_costs(objective, target_logits, logits, case.targets.labels[:, 1:][counted])
    (weights * costs).sum().backward()
    assert rows.grad is not None
    assert (gradient - exact).norm() <= 1.2 * (rows.grad - exact).norm()


@pytest.mark.parametrize("objective", MIXES, ids=str)
@pytest.mark.parametrize("scheme", ["uniform", "decay", "dpace"])
def test_chunks_change_nothing(objective: Mix, scheme: str) -> None:
    case = Case()
    whole, gradient = ours(case, config_for(objective, scheme, blocks_per_chunk=BLOCKS))
    for blocks in (1, 2, 4):
        sums, chunked = ours(case, config_for(objective, scheme, blocks_per_chunk=blocks))
        torch.testing.assert_close(chunked, gradient)
        torch.testing.assert_close(StepSums.of(sums).values, StepSums.of(whole).values)


def test_dpace_weighs_by_the_recorded_token_whatever_the_objective() -> None:
    case = Case()
    by_kl = ours(case, config_for("kl", "dpace"))[0]
    case.target = None  # type: ignore[assignment]
    by_entropy = ours(case, config_for("cross_entropy", "dpace"))[0]
    assert by_kl.weight == by_entropy.weight == case.targets.counted.sum()
    assert torch.equal(by_kl.slot_correct, by_entropy.slot_correct)
    assert by_kl.numerator != by_entropy.numerator


def logits_case(target_logits: Tensor, logits: Tensor, labels: Tensor) -> Case:
    """Given logits exactly: the head is the identity and the hidden states are the logits."""
    case = Case()
    rows, vocabulary = logits.shape
    case.head = torch.eye(vocabulary)
    blocks = rows // (BLOCK_SIZE - 1)
    padded = functional.pad(logits.unflatten(0, (blocks, BLOCK_SIZE - 1)), (0, 0, 1, 0))
    case.hidden = padded.flatten(0, 1)
    case.target = TargetStates(target_logits, torch.arange(rows).view(blocks, BLOCK_SIZE - 1))
    full = functional.pad(labels.view(blocks, -1), (1, 0))
    case.targets = BlockTargets(full, full, full, (torch.arange(BLOCK_SIZE) > 0).expand(blocks, -1))
    return case


@pytest.mark.parametrize("objective", MIXES, ids=str)
@pytest.mark.parametrize("only_counted", [True, False])
def test_extreme_logits_stay_finite_and_exact(objective: Mix, only_counted: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    logits, target_logits = (
        torch.randint(-1, 2, (10, VOCAB), generator=generator) * 1e4 + torch.randn(10, VOCAB, generator=generator)
        for _ in range(2)
    )
    labels = torch.randint(0, VOCAB, (10,), generator=generator)
    case = logits_case(target_logits, logits, labels)
    sums, gradient = ours(case, config_for(objective, "uniform", only_counted_rows=only_counted))
    exact_rows = logits.double().requires_grad_()
    exact = plain_costs(objective, target_logits.double(), exact_rows, labels).sum()
    exact.backward()
    assert torch.isfinite(sums.numerator) and torch.isfinite(gradient).all()
    assert sums.numerator.item() == pytest.approx(exact.item(), rel=1e-5)
    theirs = functional.pad(exact_rows.grad.view(2, -1, VOCAB), (0, 0, 1, 0)).flatten(0, 1)
    # At 1e4 a float32 logit is rounded to 1e-3, and so are its probability and its gradient.
    assert (gradient - theirs).norm() <= 1e-3 * theirs.norm() + 1e-6


@pytest.mark.parametrize("objective", MIXES, ids=str)
def test_one_hot_targets(objective: Mix) -> None:
    generator = torch.Generator().manual_seed(6)
    logits = 3 * torch.randn(10, VOCAB, generator=generator)
    labels = torch.randint(0, VOCAB, (10,), generator=generator)
    target_logits = torch.full((10, VOCAB), -1e4)
    target_logits[torch.arange(10), labels] = 1e4
    case = logits_case(target_logits, logits, labels)
    sums, gradient = ours(case, config_for(objective, "uniform"))

    def plain(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = logits.to(dtype).requires_grad_()
        loss = plain_costs(objective, target_logits.to(dtype), rows, labels).sum()
        loss.backward()
        return loss.detach(), functional.pad(rows.grad.view(2, -1, VOCAB), (0, 0, 1, 0)).flatten(0, 1)

    (exact, theirs), (_, plain_gradient) = plain(torch.float64), plain(torch.float32)
    assert sums.numerator.item() == pytest.approx(exact.item(), rel=1e-5)
    assert (gradient - theirs).norm() <= 1.2 * (plain_gradient - theirs).norm() + 1e-6 * theirs.norm()
    if objective == "kl":
        entropy, by_entropy = ours(case, config_for({"cross_entropy": 1.0, "tv": 1e-30}, "uniform"))
        assert sums.numerator.item() == pytest.approx(entropy.numerator.item(), rel=1e-6)
        torch.testing.assert_close(gradient, by_entropy)


@pytest.mark.parametrize("objective", SOFT)
@pytest.mark.parametrize("only_counted", [True, False])
def test_identical_distributions_cost_nothing_and_teach_nothing(objective: str, only_counted: bool) -> None:
    case = Case()
    case.hidden = functional.pad(case.target.of_blocks(slice(None)), (0, 0, 1, 0)).flatten(0, 1)
    sums, gradient = ours(case, config_for(objective, only_counted_rows=only_counted))
    assert sums.numerator == 0.0
    assert gradient.count_nonzero() == 0


def test_the_target_predicts_a_slot_one_row_before_it() -> None:
    last = torch.arange(12.0).view(6, 2)
    anchors = Anchors(torch.tensor([1, 4, 0]), torch.tensor([True, True, False]))
    states = target_states(last, anchors, 4, (torch.tensor([2.0, 1.0]), 0.0), torch.float32)
    # Slot k of the block at a is the token at a + k, which the target predicts at row a + k - 1.
    assert states.rows.tolist() == [[1, 2, 3], [4, 5, 5], [0, 1, 2]]
    root = last[2].square().mean().sqrt()
    torch.testing.assert_close(states.of_blocks(slice(0, 1))[0, 1], last[2] / root * torch.tensor([2.0, 1.0]))


def test_neither_distribution_is_ever_whole() -> None:
    case, seen = Case(), []

    def spy(chunk, head, config):  # type: ignore[no-untyped-def]
        seen.append((chunk.hidden.shape, chunk.target.shape))
        return loss_of_chunk(chunk, head, config)

    ours(case, config_for("kl"), spy)
    assert seen == [((2, BLOCK_SIZE - 1, WIDTH), (2, BLOCK_SIZE - 1, WIDTH))] * 5


def test_the_default_chunk_leaves_room_for_two_distributions() -> None:
    def blocks(objective: str) -> int:
        spec = LossSpec(objective=objective)
        config = resolve_loss_config(spec, block_size=8, vocab_size=1000, logit_soft_cap=None, device=CPU)
        return config.blocks_per_chunk

    assert blocks("kl") * 7 * 1000 * 48 <= 64 << 20 < (blocks("kl") + 1) * 7 * 1000 * 48
    assert blocks("cross_entropy") * 7 * 1000 * 8 <= 64 << 20


@pytest.fixture
def counter() -> Iterator[object]:
    """A compiler that counts graphs, and the frames that torch compiled."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


@pytest.mark.parametrize("objective", ["cross_entropy", *MIXES], ids=str)
@pytest.mark.parametrize("scheme", ["decay", "dpace"])
def test_one_graph_serves_every_pack(counter: object, objective: Mix, scheme: str) -> None:
    config = config_for(objective, scheme, only_counted_rows=False)
    compiled = torch.compile(loss_of_chunk, fullgraph=True, dynamic=False, backend=counter)
    before = compiled_graphs()
    for seed in range(4):
        case = Case(seed)
        if objective == "cross_entropy":
            case.target = None  # type: ignore[assignment]
        sums, gradient = ours(case, config, compiled)
        expected, expected_gradient = ours(case, config)
        torch.testing.assert_close(gradient, expected_gradient)
        torch.testing.assert_close(StepSums.of(sums).values, StepSums.of(expected).values)
    assert counter.frame_count == 1  # type: ignore[attr-defined]
    assert compiled_graphs() - before == 1


def test_compiled_the_first_of_equal_columns_is_the_guess() -> None:
    """As torch's maximum with its column gives it on a CPU; what is not finite is nobody's guess."""
    logits = torch.randint(0, 4, (40, 23), generator=torch.Generator().manual_seed(0)).float()
    logits[3, 5] = torch.nan
    torch._dynamo.reset()
    top, guess = torch.compile(objectives._largest, backend="eager", fullgraph=True)(logits)
    expected, column = logits.max(dim=-1, keepdim=True)
    finite = torch.isfinite(expected)
    assert torch.equal(guess[finite], column[finite].int()) and torch.equal(top[finite], expected[finite])
    assert torch.isnan(top[3]) and guess[3] == 23
