"""FP8 products on a GPU, compiled as in a run: gradients near bfloat16's, the head, the rounding of weights."""

import warnings

import pytest
import torch
from torch import Tensor

from drafter_trainer import flex_policy
from drafter_trainer.fp8 import Fp8Head, Fp8Linear, Fp8Products, check_fp8, product, quantise
from drafter_trainer.loss import drafter_loss, loss_of_chunk, resolve_loss_config
from drafter_trainer.warmup import adversarial_batches, warm_up
from slipstream.run_spec.spec import LossSpec
from tests.fakes.fp8_cases import Fp8Case, cosine, distance, fp8_case, fp8_drafter
from tests.gpu.real_step import LENGTHS, VOCABULARY, real_plan, real_spec, real_step
from tests.gpu.test_flex_drafter import _policy  # noqa: F401 - a fixture, for every test here

CUDA = torch.device("cuda")
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not HAS_FP8, reason="needs a CUDA device of compute capability 8.9 or more")


@pytest.fixture(scope="module")
def case() -> Fp8Case:
    return fp8_case(hidden=1024, layers=2, vocabulary=8192, pack_tokens=512, device="cuda")


def gradients(case: Fp8Case, dtype: torch.dtype, kind: str, *, in_fp8: bool = False) -> dict[str, Tensor]:
    """By parameter, and the output; `kind` is flex (compiled, with a compiled loss) or sdpa (eager)."""
    drafter, head = fp8_drafter(case, dtype), case.head.to(dtype)
    if in_fp8:
        products = Fp8Products(drafter, head)
        with torch.no_grad():
            flex_policy.compile_owned(products.round_weights, name="round_weights", graphs=1)()
        head = products.head
    config = resolve_loss_config(
        LossSpec(), block_size=8, vocab_size=len(case.head), logit_soft_cap=None, device=torch.device("cuda")
    )
    call, chunk = drafter, None
    if kind == "flex":
        call = flex_policy.compile_owned(drafter, name="drafter", graphs=1)
        chunk = flex_policy.compile_owned(loss_of_chunk, name="loss", graphs=1)
    hidden = call(*case.arguments(kind, dtype))
    sums = drafter_loss(hidden, head, case.targets, config, chunk)
    found = torch.autograd.grad(sums.numerator / sums.weight, list(drafter.parameters()))
    rows = case.anchors.valid.repeat_interleave(8)[:, None]
    names = [name for name, _ in drafter.named_parameters()]
    results = {**dict(zip(names, found, strict=True)), "output": hidden.detach() * rows}
    assert all(torch.isfinite(result).all() for result in results.values())
    return results


def test_every_gradient_points_where_bfloat16s_does(case: Fp8Case) -> None:
    check_fp8(CUDA)
    exact = gradients(case, torch.float64, "sdpa")
    plain = gradients(case, torch.bfloat16, "flex")
    ours = gradients(case, torch.bfloat16, "flex", in_fp8=True)
    report = {
        name: (cosine(ours[name], plain[name]), distance(ours[name], exact[name]), distance(plain[name], exact[name]))
        for name in ours
    }
    lines = [f"{name}: {a:.4f}, {b:.4f}, {c:.4f}" for name, (a, b, c) in report.items()]
    # A warning, because pytest shows it for tests that pass.
    warnings.warn("cosine with bfloat16; error of FP8, of bfloat16\n" + "\n".join(lines), stacklevel=1)
    assert min(numbers[0] for numbers in report.values()) >= 0.97, report


def test_kernels_equal_their_operands_products_in_float64() -> None:
    """Left alone are rounding to bfloat16 and, where the tensor cores may hurry, the bits they drop."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(rows, 4096, generator=generator).to(CUDA, torch.bfloat16) for rows in (1024, 2048))
    left[:, 9] *= 50.0
    left_q, right_q = quantise(left), quantise(right)
    exact = (left_q.values.double() * left_q.scale) @ (right_q.values.double() * right_q.scale).t()
    errors = {fast: distance(product(left_q, right_q, fast=fast), exact) for fast in (False, True)}
    rounding = distance(exact, left.double() @ right.double().t())
    warnings.warn(f"error of the sums, fast or not: {errors}; of rounding the operands: {rounding}", stacklevel=1)
    assert errors[False] < 3e-3
    assert errors[True] < 1.5e-2


def test_weights_and_head_are_rounded_alike_compiled_and_eager() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter((0.02 * torch.randn(1536, 1024, generator=generator)).to(CUDA, torch.bfloat16))
    layer = Fp8Linear(weight, forward_too=True)
    with torch.no_grad():
        flex_policy.compile_owned(layer.refresh, name="round_weights", graphs=1)()
    expected = quantise(weight.detach())
    assert layer.rounded is not None
    assert float(layer.scale) == pytest.approx(float(expected.scale), rel=1e-6)
    assert distance(layer.rounded.float(), expected.values.float()) < 1e-3
    assert torch.equal(layer.transposed.float(), layer.rounded.float().t())
    head = Fp8Head.of(weight.detach())
    assert distance(head.rounded.float() * head.scale, weight) < 0.04
    assert torch.equal(head.transposed.float(), head.rounded.float().t())


def test_the_real_step_is_warmed_up_and_learns_as_in_bfloat16() -> None:
    losses = {}
    for in_fp8 in (False, True):
        torch._dynamo.reset()
        torch._dynamo.callback.callback_handler.clear()
        torch.compiler.set_stance("default")
        spec = real_spec(fp8=in_fp8)
        step, plan = real_step(spec, LENGTHS[:1]), real_plan(spec, LENGTHS[:1])
        warm_up(step, plan, torch.bfloat16, vocab_size=VOCABULARY)
        step.load_weights(step.first_weights(0))
        _, batch = next(
            case
            for case in adversarial_batches(CUDA, plan, torch.bfloat16, vocab_size=VOCABULARY)
            if case[0].startswith("every anchor")
        )
        losses[in_fp8] = [step.run(batch, 1e-3).wait().acceptance.loss for _ in range(12)]
    warnings.warn(f"losses in bfloat16 {losses[False]}, in FP8 {losses[True]}", stacklevel=1)
    assert losses[True][-1] < losses[True][0] - 0.2
    assert abs(losses[True][-1] - losses[False][-1]) < 0.1 * losses[False][0]
