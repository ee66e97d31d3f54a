"""Compiled flex_attention on a GPU against SDPA with the same mask: values, gradients, graphs, tripwire, loss."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_forward_op
from torch._higher_order_ops.flex_attention import flex_attention_backward as flex_backward_op
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from drafter_trainer import flex_policy
from drafter_trainer.anchors import Anchors, BlockTargets, build_block_targets, draw_anchors
from drafter_trainer.block_mask import build_block_attention, list_tiles, visible_intervals
from drafter_trainer.drafter import DFlashDrafter, initialise_weights
from drafter_trainer.drafter_config import FULL, SLIDING
from drafter_trainer.loss import drafter_loss, loss_of_chunk, resolve_loss_config
from drafter_trainer.objectives import SlotInput, slot_statistics
from drafter_trainer.slot_weights import decay_weights
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import LossSpec
from tests.fakes.drafter_cases import MASK_TOKEN, TINY, VOCAB, packed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, none is visible")

PACK_TOKENS, NUM_ANCHORS, HIDDEN = 512, 40, 128
CUDA = torch.device("cuda")
CASES = {"drawn": None, "no valid anchor": 0, "one valid anchor": 1}


@pytest.fixture(autouse=True)
def _policy() -> Iterator[None]:
    """The tripwire for every test here; a failing compile of one test does not reach the next."""
    kept = [(operator, dict(operator.py_kernels)) for operator in (flex_forward_op, flex_backward_op)]
    torch._dynamo.reset()
    flex_policy.configure_compiler()
    flex_policy.install_tripwire()
    yield
    torch._dynamo.callback.callback_handler.clear()
    torch.compiler.set_stance("default")
    for operator, kernels in kept:
        operator.py_kernels.update(kernels)
        operator._dispatch_cache.clear()


def build_drafter(block_size: int, dtype: torch.dtype) -> DFlashDrafter:
    config = dataclasses.replace(
        TINY,
        block_size=block_size,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        layer_types=(FULL, SLIDING),
        sliding_window=100,
        rope_theta=10000.0,
    )
    drafter = DFlashDrafter(config)
    initialise_weights(drafter, 0, torch.ones(HIDDEN))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    return drafter.to(CUDA, dtype)


def run(
    drafter: DFlashDrafter, call: Callable[..., Tensor], kind: str, seed: int, most_valid: int | None = None
) -> list[Tensor]:
    """Hidden rows of valid anchors, then the gradient of every parameter, float32 on the CPU."""
    pack = packed([100, 30, 250, 1, 90 + seed], PACK_TOKENS, seed=seed)
    drawn = draw_anchors(pack["loss_mask"], pack["document_ids"], NUM_ANCHORS, seed, 0)
    keep = NUM_ANCHORS - 3 if most_valid is None else most_valid
    anchors = Anchors(drawn.positions, drawn.valid & (torch.arange(NUM_ANCHORS) < keep)).to(CUDA)
    pack = {name: tensor.to(CUDA) for name, tensor in pack.items()}
    block_size = drafter.config.block_size
    targets = build_block_targets(pack, anchors, block_size=block_size, mask_token_id=MASK_TOKEN)
    attention = build_block_attention(drafter.attention_layout(kind), anchors, pack["position_ids"])
    generator = torch.Generator().manual_seed(seed)
    dtype = drafter.fc.weight.dtype
    embed = torch.randn(VOCAB, HIDDEN, generator=generator).to(CUDA, dtype)
    features = torch.randn(PACK_TOKENS, 2 * HIDDEN, generator=generator).to(CUDA, dtype)
    direction = torch.randn(NUM_ANCHORS * block_size, HIDDEN, generator=generator).to(CUDA, dtype)
    drafter.zero_grad()
    hidden = call(
        features,
        embed[targets.block_ids.flatten()],
        pack["position_ids"],
        targets.block_positions.flatten(),
        attention,
    )
    rows = anchors.valid.repeat_interleave(block_size)[:, None]
    (torch.where(rows, hidden, 0.0) * direction).sum().backward()
    results = [torch.where(rows, hidden, 0.0).detach(), *(p.grad for p in drafter.parameters())]
    assert all(torch.isfinite(result).all() for result in results)
    assert torch.isfinite(hidden).all()
    return [result.float().cpu() for result in results]


def distance(ours: list[Tensor], theirs: list[Tensor]) -> list[float]:
    """Relative distance by norm, per tensor; 0 where both are 0."""
    return [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("block_size", [7, 8, 16])
def test_float32_equals_sdpa_and_new_packs_cost_no_graph(block_size: int) -> None:
    drafter = build_drafter(block_size, torch.float32)
    compiled = flex_policy.compile_owned(drafter, name="drafter", graphs=1)
    before = flex_policy.compiled_graphs()
    for seed, most_valid in enumerate((None, 0, 1, NUM_ANCHORS, None)):
        ours = run(drafter, compiled, "flex", seed, most_valid)
        assert max(distance(ours, run(drafter, drafter, "sdpa", seed, most_valid))) < 2e-4
    assert flex_policy.compiled_graphs() - before == 1


@pytest.mark.parametrize("block_size", [7, 8, 16])
def test_bfloat16_is_as_near_to_float32_as_sdpa_is(block_size: int) -> None:
    """Per parameter, over six packs: a norm of 64 gains alone estimates its error to a tenth only."""
    rounded = build_drafter(block_size, torch.bfloat16).float()
    drafter = build_drafter(block_size, torch.bfloat16)
    compiled = flex_policy.compile_owned(drafter, name="drafter", graphs=1)
    names = ["hidden states", *(name for name, _ in drafter.named_parameters())]
    squared = torch.zeros(2, len(names))
    for seed in range(1, 7):
        exact = run(rounded, rounded, "sdpa", seed)
        squared[0] += torch.tensor(distance(run(drafter, compiled, "flex", seed), exact)).square()
        squared[1] += torch.tensor(distance(run(drafter, drafter, "sdpa", seed), exact)).square()
    ours, plain = (squared / 6).sqrt().tolist()
    worse = [f"{name}: {a:.5f}, SDPA {b:.5f}" for name, a, b in zip(names, ours, plain, strict=True) if a > 1.2 * b]
    assert not worse, worse


def test_the_tripwire_holds_and_the_self_test_passes() -> None:
    query = torch.randn(1, 2, 128, 64, device=CUDA, requires_grad=True)
    with pytest.raises(SlipstreamError, match="ran uncompiled") as caught:
        flex_attention(query, query, query)
    assert caught.value.reason is Reason.DENSE_ATTENTION
    flex_policy.self_test(CUDA)


def test_after_the_freeze_another_shape_is_refused() -> None:
    drafter = build_drafter(8, torch.bfloat16)
    compiled = flex_policy.compile_owned(drafter, name="drafter", graphs=1)
    run(drafter, compiled, "flex", 0)
    flex_policy.CompilationFreeze().freeze()
    run(drafter, compiled, "flex", 1)
    with torch.no_grad(), pytest.raises((RuntimeError, SlipstreamError)):
        compiled(
            torch.zeros(128, 2 * HIDDEN, device=CUDA, dtype=torch.bfloat16),
            torch.zeros(8, HIDDEN, device=CUDA, dtype=torch.bfloat16),
            torch.arange(128, device=CUDA),
            torch.arange(8, device=CUDA),
            build_block_attention(
                drafter.attention_layout("flex"),
                Anchors(torch.tensor([5]), torch.tensor([True])).to(CUDA),
                torch.arange(128, device=CUDA),
            ),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["decay", "dpace"])
def test_the_compiled_loss_is_as_exact_as_plain_pytorch(dtype: torch.dtype, scheme: str) -> None:
    vocabulary, width, blocks = 30_011, 256, 50
    generator = torch.Generator().manual_seed(3)
    head = (0.3 * torch.randn(vocabulary, width, generator=generator)).to(CUDA, dtype)
    labels = torch.randint(0, vocabulary, (blocks, 8), generator=generator).to(CUDA)
    counted = (torch.arange(8) < torch.randint(1, 9, (blocks, 1), generator=generator)).to(CUDA)
    counted &= torch.arange(8, device=CUDA) > 0
    targets = BlockTargets(labels, labels, labels, counted)
    noise = torch.randn(blocks * 8, width, generator=generator).to(CUDA)
    hidden = (0.2 * head[labels.flatten()].float() + 0.3 * noise).to(dtype)
    config = resolve_loss_config(
        LossSpec(slot_weights=scheme, chunk_rows=112),
        block_size=8,
        vocab_size=vocabulary,
        logit_soft_cap=None,
        device=CUDA,
    )
    compiled = flex_policy.compile_owned(loss_of_chunk, name="loss", graphs=1)
    rows = hidden.clone().requires_grad_()
    sums = drafter_loss(rows, head, targets, config, compiled)
    (sums.numerator / sums.weight).backward()

    if scheme == "dpace":
        weights, step_weight = dpace_by_hand(hidden, head, targets), counted.sum()
    else:
        weights = decay_weights(8, config.decay_gamma, CUDA) * counted[:, 1:]
        step_weight = weights.sum()
    assert sums.weight.item() == pytest.approx(step_weight.item(), rel=1e-5)
    exact = plain_gradient(hidden.double(), head.double(), targets, weights / step_weight)
    error = (rows.grad.double() - exact).norm()
    plain_error = (plain_gradient(hidden, head, targets, weights / step_weight).double() - exact).norm()
    assert error <= 1.2 * plain_error


@pytest.mark.parametrize("tokens", [512, 9_600, 40_960])
def test_tile_lists_are_the_same_compiled(tokens: int) -> None:
    """A handful of tiles, a number that no kernel likes (83), and those of a long pack (384): torch 2.11 could not
    compile a prefix sum over so many."""
    pack = packed([tokens // 3, tokens // 5, tokens - tokens // 3 - tokens // 5], tokens)
    anchors = draw_anchors(pack["loss_mask"], pack["document_ids"], 512 if tokens > 20_000 else 64, 0, 0)
    block, positions = 16, pack["position_ids"]
    queries = len(anchors.valid) * block

    def tiles(anchors: Anchors, positions: Tensor) -> tuple[Tensor, ...]:
        return tuple(list_tiles(visible_intervals(anchors, positions, block), tokens, queries))

    compiled = flex_policy.compile_owned(tiles, name="tiles", graphs=1)
    found, expected = compiled(anchors.to(CUDA), positions.to(CUDA)), tiles(anchors, positions)
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_the_compiled_guess_is_the_first_largest_column(soft_cap: float | None) -> None:
    """It is found by comparing every logit with the largest, both computed from what the head's product left."""
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(30_011, 256, generator=generator).to(CUDA, torch.bfloat16)
    head[20_000:20_100] = head[:100]  # equal logits
    hidden = head[torch.randint(0, 20_100, (112,), generator=generator)] * 0.3
    hidden[0] = 0.0
    logits = (hidden @ head.t()).float()
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    first = (logits == logits.amax(dim=-1, keepdim=True)).int().argmax(dim=-1)

    def correct(hidden: Tensor, labels: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        statistics = slot_statistics(SlotInput(hidden, labels, None), head, soft_cap, {"cross_entropy": 1.0}, 3.0)
        return statistics.correct, statistics.gradient

    compiled = flex_policy.compile_owned(correct, name="guess", graphs=1)
    found, _ = compiled(hidden, first, head)
    assert found.float().mean() > 0.97, "but for products that round otherwise"
    assert not compiled(hidden, (first + 1) % len(head), head)[0].any()


def plain_gradient(hidden: Tensor, head: Tensor, targets: BlockTargets, weights: Tensor) -> Tensor:
    """Straightforward PyTorch in the precision of its arguments; weights [N, S] of the slots, S = B - 1."""
    rows = hidden.detach().clone().requires_grad_()
    logits = functional.linear(rows, head)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = functional.cross_entropy(logits, targets.labels.flatten(), reduction="none").view_as(targets.labels)
    (losses[:, 1:] * weights).sum().backward()
    return rows.grad


def dpace_by_hand(hidden: Tensor, head: Tensor, targets: BlockTargets) -> Tensor:
    """D-PACE weights at alpha 0.5 from float64 losses, slot by slot."""
    losses = functional.cross_entropy((hidden.double() @ head.double().t()), targets.labels.flatten(), reduction="none")
    losses = losses.view_as(targets.labels)[:, 1:].tolist()
    counted = targets.counted[:, 1:].tolist()
    weights = torch.zeros(len(losses), len(losses[0]), dtype=torch.float64)
    for block, row in enumerate(losses):
        reach = 1.0
        for slot, loss in enumerate(row):
            if counted[block][slot]:
                reach *= 0.5 * float(torch.tensor(-loss).exp()) + 0.5
                weights[block, : slot + 1] += reach
    return weights.to(hidden.device)
