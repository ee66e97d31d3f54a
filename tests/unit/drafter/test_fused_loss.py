"""The loss in two kernels against the plain one in float64 and the compiled one's code: on a GPU, or interpreted.

TRITON_INTERPRET=1 pytest tests/unit/drafter/test_fused_loss.py
"""

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

from drafter_trainer import fused_loss
from drafter_trainer.anchors import BlockTargets
from drafter_trainer.fused_loss import fused_loss_of_chunk, why_not_fused
from drafter_trainer.loss import LossSums, drafter_loss
from drafter_trainer.target_states import TargetStates
from tests.unit.drafter.test_objectives import Case, Mix, config_for, ours, plain_loss

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_RUNS = importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or _INTERPRETED)
needs_triton = pytest.mark.skipif(not _RUNS, reason="needs Triton and a CUDA device, or TRITON_INTERPRET=1")
DEVICE = torch.device("cpu" if _INTERPRETED else "cuda")
# Of sums over all slots, both in float32; a GPU's exponential is exact to two units in the last place.
CLOSE = 2e-6 if _INTERPRETED else 1e-5
MIXES = ["cross_entropy", "kl", {"cross_entropy": 0.5, "kl": 2.0}]


@pytest.fixture
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """101 columns are then four blocks, the last one not full."""
    from drafter_trainer import loss_kernel

    monkeypatch.setattr(loss_kernel, "_COLUMNS", 32)
    yield


def on_device(case: Case, *, with_target: bool) -> Case:
    case.head, case.hidden = case.head.to(DEVICE), case.hidden.to(DEVICE)
    case.targets = BlockTargets(*(tensor.to(DEVICE) for tensor in case.targets))
    states, rows = case.target.states.to(DEVICE), case.target.rows.to(DEVICE)
    case.target = TargetStates(states, rows) if with_target else None
    return case


@needs_triton
@pytest.mark.parametrize("scheme", ["uniform", "decay", "dpace"])
@pytest.mark.parametrize("objective", MIXES, ids=str)
@pytest.mark.usefixtures("_several_blocks")
def test_it_gives_what_the_plain_chunk_gives(objective: Mix, scheme: str) -> None:
    config = config_for(objective, scheme, only_counted_rows=False)
    for seed in range(3):
        case = on_device(Case(seed), with_target=objective != "cross_entropy")
        (fused, gradient), (plain, expected) = ours(case, config, fused_loss_of_chunk), ours(case, config)
        for name in ("numerator", "weight", "slot_correct", "slot_count", "matched_prefix", "blocks"):
            torch.testing.assert_close(getattr(fused, name), getattr(plain, name), rtol=CLOSE, atol=1e-6)
        torch.testing.assert_close(gradient, expected, rtol=2e-5, atol=2e-6 * expected.abs().max().item())


@needs_triton
@pytest.mark.parametrize("objective", MIXES, ids=str)
@pytest.mark.usefixtures("_several_blocks")
def test_value_and_gradient_are_as_exact_as_plain_float32(objective: Mix) -> None:
    config = config_for(objective, only_counted_rows=False)
    for seed in range(3):
        exact, exact_gradient = plain_loss(Case(seed), objective, torch.float64)
        plain, plain_gradient = plain_loss(Case(seed), objective, torch.float32)
        case = on_device(Case(seed), with_target=objective != "cross_entropy")
        sums, gradient = ours(case, config, fused_loss_of_chunk)
        # A GPU's exponential is exact to two units in the last place, which a CPU's is not allowed.
        resolution = 8 * torch.finfo(torch.float32).eps
        error, plain_error = (gradient.cpu() - exact_gradient).norm(), (plain_gradient - exact_gradient).norm()
        assert error <= 1.2 * plain_error + resolution * exact_gradient.norm()
        assert (sums.numerator.cpu() - exact).abs() <= 1.2 * (plain - exact).abs() + resolution * exact


@needs_triton
@pytest.mark.parametrize("objective", MIXES, ids=str)
@pytest.mark.parametrize("vocabulary", [101, 4096, 9001])
def test_bfloat16_over_whole_and_broken_blocks(objective: Mix, vocabulary: int) -> None:
    """Logits far apart, ties among the largest, a label that has all the mass, and one that has none."""
    generator = torch.Generator().manual_seed(vocabulary)
    case = on_device(Case(1, torch.bfloat16), with_target=objective != "cross_entropy")
    case.head = torch.randn(vocabulary, case.hidden.shape[1], generator=generator).to(DEVICE, torch.bfloat16)
    case.head[7] = case.head[3]  # a tie: the first column is the guess
    case.head[5] = 8 * case.hidden[2] / case.hidden[2].float().norm()
    labels = torch.randint(0, vocabulary, case.targets.labels.shape, generator=generator).to(DEVICE)
    labels[0, :3] = torch.tensor([5, 7, 3])
    case.targets = case.targets._replace(labels=labels)
    config = config_for(objective, only_counted_rows=False)
    (fused, gradient), (plain, expected) = ours(case, config, fused_loss_of_chunk), ours(case, config)
    torch.testing.assert_close(fused.numerator, plain.numerator, rtol=1e-4, atol=1e-4)
    assert torch.equal(fused.slot_correct, plain.slot_correct)
    assert (gradient - expected).float().norm() <= 0.01 * expected.float().norm()


@needs_triton
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.usefixtures("_several_blocks")
def test_what_is_not_finite_is_seen(bad: float) -> None:
    case = on_device(Case(0), with_target=True)
    rows = case.hidden.clone()
    rows[1, 0] = bad
    config = config_for("kl", only_counted_rows=False)
    sums: LossSums = drafter_loss(rows, case.head, case.targets, config, fused_loss_of_chunk, case.target)
    assert not sums.numerator.isfinite()


def test_what_keeps_a_run_from_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_loss, "FUSED_LOSS", True)
    head = torch.empty(8, 4)
    assert why_not_fused(config_for("kl"), head) is None
    assert why_not_fused(config_for({"kl": 1.0, "cross_entropy": 0.1}), head) is None
    assert "tv" in str(why_not_fused(config_for({"kl": 1.0, "tv": 0.1}), head))
    assert "caps" in str(why_not_fused(config_for("kl", logit_soft_cap=30.0), head))
