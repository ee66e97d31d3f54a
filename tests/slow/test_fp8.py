"""FP8 products on the CPU, through the kernels of torch: gradients near bfloat16's, rules, refusals, one graph."""

import pytest
import torch
from torch import Tensor, nn

from drafter_trainer import fp8
from drafter_trainer.flex_policy import compile_owned
from drafter_trainer.fp8 import Fp8Head, Fp8Linear, Fp8Products
from drafter_trainer.frozen_weights import FrozenWeights
from drafter_trainer.loss import drafter_loss, resolve_loss_config
from drafter_trainer.optimizer import DrafterOptimizer
from drafter_trainer.step import TrainingStep
from drafter_trainer.warmup import adversarial_batches
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import LossSpec, OptimizerSpec, TrainSpec
from tests.fakes.fp8_cases import Fp8Case, cosine, distance, fp8_case, fp8_drafter
from tests.gpu.real_step import HIDDEN, LENGTHS, VOCABULARY, real_config, real_plan, real_spec

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def case() -> Fp8Case:
    return fp8_case(hidden=512, layers=2, vocabulary=2048, pack_tokens=128)


def step_of(
    case: Fp8Case, dtype: torch.dtype, *, in_fp8: bool = False, spec: LossSpec | None = None
) -> dict[str, Tensor]:
    """The gradient of every parameter, the output, the loss."""
    drafter, head = fp8_drafter(case, dtype), case.head.to(dtype)
    if in_fp8:
        products = Fp8Products(drafter, head)
        with torch.no_grad():
            products.round_weights()
        head = products.head
    config = resolve_loss_config(
        spec or LossSpec(),
        block_size=case.config.block_size,
        vocab_size=len(case.head),
        logit_soft_cap=None,
        device=CPU,
    )
    hidden = drafter(*case.arguments("sdpa", dtype))
    sums = drafter_loss(hidden, head, case.targets, config)
    loss = sums.numerator / sums.weight
    gradients = torch.autograd.grad(loss, list(drafter.parameters()))
    names = [name for name, _ in drafter.named_parameters()]
    return {**dict(zip(names, gradients, strict=True)), "output": hidden.detach(), "loss": loss.detach()}


def test_every_gradient_points_where_bfloat16s_does(case: Fp8Case) -> None:
    exact = step_of(case, torch.float64)
    plain, ours = step_of(case, torch.bfloat16), step_of(case, torch.bfloat16, in_fp8=True)
    assert abs(ours["loss"] - exact["loss"]) < 0.05
    cosines = {name: cosine(ours[name], plain[name]) for name in ours}
    errors = {
        name: (round(distance(ours[name], exact[name]), 3), round(distance(plain[name], exact[name]), 3))
        for name in ours
    }
    assert min(cosines.values()) >= 0.97, sorted(cosines.items(), key=lambda item: item[1])[:5]
    # Three bits of mantissa where bfloat16 has seven: sixteen times its rounding, product by product.
    assert all(of_fp8 <= max(0.25, 16 * of_plain) for of_fp8, of_plain in errors.values()), errors


@pytest.mark.parametrize("rows", [48, 40])
@pytest.mark.parametrize("forward_too", [True, False])
def test_one_layer_of_the_reference_size(forward_too: bool, rows: int) -> None:
    """Rows that do not fill sixteen are filled with zeros; the layer's own width is Qwen3-8B's."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(rows, 4096, generator=generator) * (0.5 * torch.randn(rows, 1, generator=generator)).exp()
    states[:, ::1000] *= 80.0
    states = states.bfloat16().requires_grad_()
    weight = nn.Parameter((0.02 * torch.randn(1024, 4096, generator=generator)).bfloat16())
    layer = Fp8Linear(weight, forward_too=forward_too)
    with torch.no_grad():
        layer.refresh()
    by_output = torch.randn(rows, 1024, generator=generator) * (3.0 * torch.randn(rows, 1, generator=generator)).exp()
    found = layer(states)
    ours = (found, *torch.autograd.grad(found, (states, weight), by_output.bfloat16()))
    expected = states @ weight.t()
    theirs = (expected, *torch.autograd.grad(expected, (states, weight), by_output.bfloat16()))
    assert [tensor.dtype for tensor in ours] == [torch.bfloat16] * 3
    assert all(cosine(a, b) >= 0.997 for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(ours[0], theirs[0]) is not forward_too


@pytest.mark.parametrize(
    "spec", [LossSpec(), LossSpec(objective={"kl": 0.5, "tv": 0.5}), LossSpec(slot_weights="dpace")]
)
def test_the_rounded_head(spec: LossSpec) -> None:
    generator = torch.Generator().manual_seed(1)
    vocabulary, width = 8192, 512
    head = (0.05 * torch.randn(vocabulary, width, generator=generator)).bfloat16()
    case = fp8_case(hidden=512, layers=1, vocabulary=vocabulary, pack_tokens=128)
    targets = case.targets
    hidden = torch.randn(targets.labels.numel(), width, generator=generator)
    hidden[:, 7] *= 30.0
    hidden = (hidden + 5.0 * head[targets.labels.flatten()].float()).bfloat16()
    config = resolve_loss_config(spec, block_size=8, vocab_size=vocabulary, logit_soft_cap=None, device=CPU)
    states = None
    if spec.needs_target_distribution:
        other = torch.randn(len(targets.labels), 7, width, generator=generator).bfloat16()

        class States:
            def of_blocks(self, part: slice) -> Tensor:
                return other[part]

        states = States()
    results = []
    for weights in (head, Fp8Head.of(head)):
        rows = hidden.clone().requires_grad_()
        sums = drafter_loss(rows, weights, targets, config, None, states)  # type: ignore[arg-type]
        results.append((float(sums.numerator.detach() / sums.weight), *torch.autograd.grad(sums.numerator, rows)))
    (plain_loss, plain), (loss, ours) = results
    assert loss == pytest.approx(plain_loss, rel=0.02)
    assert cosine(ours, plain) >= 0.99


def test_names_and_checkpoints_stay_and_what_stays_bfloat16_is_said(caplog: pytest.LogCaptureFixture) -> None:
    case = fp8_case(hidden=512, layers=1, vocabulary=1000, pack_tokens=128)
    drafter = fp8_drafter(case, torch.bfloat16)
    state = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    with torch.no_grad():
        drafter.layers[0].self_attn.k_proj.weight = nn.Parameter(torch.zeros(256, 512, dtype=torch.bfloat16))
        drafter.layers[0].self_attn.k_proj.out_features = 256
        state["layers.0.self_attn.k_proj.weight"] = drafter.layers[0].self_attn.k_proj.weight.clone()
    with caplog.at_level("INFO"):
        products = Fp8Products(drafter, case.head.bfloat16())
    assert products.stays_bfloat16 == {
        "layers.0.self_attn.k_proj": "256 x 512 is narrower than 512",
        "lm_head": "1000 x 512 is not a multiple of 16",
    }
    assert torch.is_tensor(products.head)
    assert list(drafter.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in drafter.state_dict().items())
    forwards = [
        name for name, layer in drafter.named_modules() if isinstance(layer, Fp8Linear) and layer.rounded is not None
    ]
    assert forwards == [f"layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert any(record.message == "fp8" for record in caplog.records)


def test_weights_are_rounded_after_every_change(case: Fp8Case) -> None:
    drafter = fp8_drafter(case, torch.bfloat16)
    optimizer = DrafterOptimizer(drafter, OptimizerSpec(), compute_dtype=torch.bfloat16)
    products = Fp8Products(drafter, case.head.bfloat16())
    optimizer.on_new_weights(products.round_weights)
    layer = drafter.layers[0].mlp.gate_proj
    optimizer.load_weights({name: weight.clone() for name, weight in optimizer.weights().items()})
    first = layer.rounded.float() * layer.scale
    assert distance(first, layer.weight.detach()) < 0.04
    optimizer.add_gradients([torch.randn_like(parameter) for parameter in optimizer.parameters], is_first=True)
    optimizer.apply(0.05, torch.ones(()), torch.ones(()))
    second = layer.rounded.float() * layer.scale
    assert distance(second, first) > 0.3
    assert distance(second, layer.weight.detach()) < 0.04
    assert torch.equal(layer.transposed.float(), layer.rounded.float().t())


def test_what_is_not_finite_stays_visible(case: Fp8Case) -> None:
    layer = Fp8Linear(nn.Parameter(torch.randn(512, 512).bfloat16()), forward_too=True)
    with torch.no_grad():
        layer.refresh()
    states = torch.randn(16, 512).bfloat16().requires_grad_()
    for bad in (float("inf"), float("nan")):
        broken = states.detach().clone()
        broken[3, 5] = bad
        assert not torch.isfinite(layer(broken)[3]).any()
        by_output = torch.zeros(16, 512, dtype=torch.bfloat16)
        by_output[2, 2] = bad
        gradients = torch.autograd.grad(layer(states), (states, layer.weight), by_output)
        assert not any(torch.isfinite(gradient).all() for gradient in gradients)
    nothing = torch.autograd.grad(layer(states), (states, layer.weight), torch.zeros(16, 512, dtype=torch.bfloat16))
    assert not any(gradient.any() for gradient in nothing)


def test_one_whole_graph_computes_the_same(case: Fp8Case) -> None:
    """Traced like the run's, with the products as eager kernels."""
    drafter = fp8_drafter(case, torch.bfloat16)
    products = Fp8Products(drafter, case.head.bfloat16())
    with torch.no_grad():
        products.round_weights()
    arguments = case.arguments("sdpa", torch.bfloat16)
    direction = torch.randn(1, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.autograd.grad((drafter(*arguments) * direction).sum(), list(drafter.parameters()))
    torch._dynamo.reset()
    compiled = torch.compile(drafter.forward, fullgraph=True, dynamic=False, backend="aot_eager")
    found = torch.autograd.grad((compiled(*arguments) * direction).sum(), list(drafter.parameters()))
    assert all(cosine(ours, theirs) > 0.9999 for ours, theirs in zip(found, expected, strict=True))
    layer = drafter.layers[1].mlp.down_proj
    assert isinstance(layer, Fp8Linear) and layer.rounded is not None
    kept = layer.rounded.clone()
    layer.rounded.zero_()
    with torch.no_grad():
        compile_owned(products.round_weights, name="round_weights", graphs=1)()
    assert torch.equal(layer.rounded.view(torch.uint8), kept.view(torch.uint8))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="fp8 rounds what is bfloat16, but precision is 'float32'"):
        TrainSpec(fp8=True, precision="float32", max_steps=1)
    with pytest.raises(SlipstreamError, match="no layer of this drafter fits: fc ") as caught:
        small = fp8_case(hidden=64, layers=1, vocabulary=37, pack_tokens=128)
        Fp8Products(fp8_drafter(small, torch.bfloat16), small.head.bfloat16())
    assert caught.value.reason is Reason.SPEC_INVALID
    fp8.check_fp8(CPU)
    with pytest.raises(SlipstreamError, match="compute capability 8.6; FP8 products begin with 8.9") as caught:
        fp8.check_capability((8, 6), "NVIDIA A40")
    assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED
    fp8.check_capability((9, 0), "NVIDIA H200")
    fp8.check_capability((12, 0), "NVIDIA RTX PRO 6000")


def test_a_step_learns_as_in_bfloat16() -> None:
    """The real step on the CPU, whole: rounded head, rounded weights after every update."""
    losses = {}
    for in_fp8 in (False, True):
        spec = real_spec(device="cpu", attention="sdpa", fp8=in_fp8)
        table = 0.05 * torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(0))
        frozen = FrozenWeights(table.bfloat16(), table.bfloat16(), torch.ones(HIDDEN), 1.0)
        step, plan = TrainingStep(real_config(spec), frozen, spec, LENGTHS[:1]), real_plan(spec, LENGTHS[:1])
        step.load_weights(step.first_weights(0))
        batches = adversarial_batches(CPU, plan, torch.bfloat16, vocab_size=VOCABULARY)
        batch = next(batch for name, batch in batches if name.startswith("every anchor"))
        losses[in_fp8] = [step.run(batch, 3e-3).wait().acceptance.loss for _ in range(4)]
    assert losses[True][-1] < losses[True][0] - 0.2
    assert losses[True] == pytest.approx(losses[False], rel=0.05)
    assert losses[True] != losses[False]
