"""The flat optimizer against torch's own AdamW and clipping."""

import math

import pytest
import torch
from torch import Tensor, nn

from drafter_trainer.optimizer import DrafterOptimizer
from slipstream.run_spec.spec import OptimizerSpec

SPEC = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5)


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def gradients(module: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in module.named_parameters()}


def feed(
    optimizer: DrafterOptimizer,
    module: nn.Module,
    by_name: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    is_first: bool = True,
) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    gradients = [by_name[names[id(parameter)]].to(dtype) for parameter in optimizer.parameters]
    optimizer.add_gradients(gradients, is_first=is_first)


def scalar(value: float) -> Tensor:
    return torch.tensor(value)


def test_equals_torch_adamw_with_clipping_over_several_packs() -> None:
    module, reference = make_module(), make_module()
    optimizer = DrafterOptimizer(module, SPEC, compute_dtype=torch.float32)
    matrices = [p for p in reference.parameters() if p.dim() >= 2]
    vectors = [p for p in reference.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=SPEC.betas,
        eps=SPEC.epsilon,
    )
    for step in range(4):
        first, second = gradients(module, 2 * step), gradients(module, 2 * step + 1)
        feed(optimizer, module, first, torch.float32)
        feed(optimizer, module, second, torch.float32, is_first=False)
        applied = optimizer.apply(1e-2, scalar(1.0), scalar(3.0))
        for name, parameter in reference.named_parameters():
            parameter.grad = (first[name] + second[name]) / 3.0
        norm = nn.utils.clip_grad_norm_(reference.parameters(), SPEC.clip_norm)
        adamw.step()
        torch.testing.assert_close(applied.gradient_norm, norm)
        assert applied.applied == 1.0
    for (name, ours), (_, theirs) in zip(module.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)


def test_bfloat16_computes_in_bfloat16_and_learns_in_float32() -> None:
    module = make_module()
    optimizer = DrafterOptimizer(module, SPEC, compute_dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    before = {name: weight.clone() for name, weight in optimizer.weights().items()}
    # Updates far below bfloat16's resolution must add up in the masters.
    for step in range(3):
        feed(optimizer, module, gradients(module, step), torch.bfloat16)
        optimizer.apply(1e-6, scalar(1.0), scalar(1.0))
    for name, parameter in module.named_parameters():
        master = optimizer.weights()[name]
        assert master.dtype is torch.float32 and not torch.equal(master, before[name])
        assert torch.equal(parameter, master.bfloat16())


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_what_is_not_finite_changes_nothing(loss: float, gradient: float) -> None:
    module = make_module()
    optimizer = DrafterOptimizer(module, SPEC, compute_dtype=torch.float32)
    feed(optimizer, module, gradients(module, 0), torch.float32)
    optimizer.apply(1e-2, scalar(1.0), scalar(1.0))
    weights = {name: weight.clone() for name, weight in optimizer.weights().items()}
    state = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}

    poisoned = gradients(module, 1)
    poisoned["0.weight"][0, 0] = gradient
    feed(optimizer, module, poisoned, torch.float32)
    applied = optimizer.apply(1e-2, scalar(loss), scalar(1.0))

    assert applied.applied == 0.0
    assert all(torch.equal(weights[name], weight) for name, weight in optimizer.weights().items())
    assert all(torch.equal(state[name], tensor) for name, tensor in optimizer.state_tensors().items())
    # And the next step is as if the poisoned one had never been.
    feed(optimizer, module, gradients(module, 2), torch.float32)
    assert optimizer.apply(1e-2, scalar(1.0), scalar(1.0)).applied == 1.0
    assert optimizer.state_tensors()["step"] == 2.0


def test_state_survives_a_round_trip_bit_for_bit() -> None:
    straight, resumed = make_module(), make_module()
    one = DrafterOptimizer(straight, SPEC, compute_dtype=torch.float32)
    for step in range(2):
        feed(one, straight, gradients(straight, step), torch.float32)
        one.apply(1e-2, scalar(1.0), scalar(1.0))
    other = DrafterOptimizer(resumed, SPEC, compute_dtype=torch.float32)
    other.load_weights({name: weight.clone() for name, weight in one.weights().items()})
    other.load_state({name: tensor.clone() for name, tensor in one.state_tensors().items()})
    for optimizer, module in ((one, straight), (other, resumed)):
        feed(optimizer, module, gradients(module, 9), torch.float32)
        optimizer.apply(1e-2, scalar(1.0), scalar(1.0))
    assert all(torch.equal(one.weights()[name], other.weights()[name]) for name in one.weights())
    assert all(torch.equal(one.state_tensors()[name], other.state_tensors()[name]) for name in one.state_tensors())
