"""The one-pass AdamW of CUDA, run here as plain tensor code: torch's AdamW, whichever way its gradients come."""

import pytest
import torch
from torch import Tensor

from drafter_trainer.fused_adamw import adamw_update
from drafter_trainer.optimizer import DrafterOptimizer, FusedUpdate
from tests.unit.trainer_runtime.test_optimizer import SPEC, feed, gradients, make_module, scalar

DTYPES = (torch.float32, torch.bfloat16)


def state_of(optimizer: DrafterOptimizer) -> dict[str, Tensor]:
    everything = optimizer.weights() | optimizer.state_tensors()
    return {name: tensor.clone() for name, tensor in everything.items()}


@pytest.mark.parametrize("sums_gradients", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_updates_as_torchs_kernel_does(sums_gradients: bool, dtype: torch.dtype) -> None:
    modules = make_module(), make_module()
    fused = DrafterOptimizer(modules[0], SPEC, compute_dtype=dtype, fused=FusedUpdate(adamw_update, sums_gradients))
    plain = DrafterOptimizer(modules[1], SPEC, compute_dtype=dtype)
    for step in range(4):
        feed(fused, modules[0], gradients(modules[0], step), dtype)
        feed(plain, modules[1], gradients(modules[1], step), dtype)
        rate = 1e-2 / (step + 1)
        ours, theirs = fused.apply(scalar(rate), scalar(1.0), scalar(3.0)), plain.apply(rate, scalar(1.0), scalar(3.0))
        assert ours.gradient_norm == pytest.approx(float(theirs.gradient_norm), rel=1e-5)
    for name, tensor in state_of(plain).items():
        torch.testing.assert_close(state_of(fused)[name], tensor, rtol=2e-5, atol=1e-7, msg=name)
    for parameter, weight in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        torch.testing.assert_close(parameter, weight, rtol=2e-2 if dtype == torch.bfloat16 else 2e-5, atol=1e-6)
    # What the module computes with is the rounded master.
    masters = fused.weights()
    for name, parameter in modules[0].named_parameters():
        assert torch.equal(parameter, masters[name].to(dtype))


@pytest.mark.parametrize("sums_gradients", [False, True])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_what_is_not_finite_changes_nothing(sums_gradients: bool, before: int, poison: str) -> None:
    module = make_module()
    optimizer = DrafterOptimizer(
        module, SPEC, compute_dtype=torch.bfloat16, fused=FusedUpdate(adamw_update, sums_gradients)
    )
    for step in range(before):
        feed(optimizer, module, gradients(module, step), torch.bfloat16)
        optimizer.apply(scalar(1e-2), scalar(1.0), scalar(1.0))
    kept, computed = state_of(optimizer), [parameter.clone() for parameter in module.parameters()]
    poisoned = gradients(module, 9)
    if poison == "gradient":
        next(iter(poisoned.values())).view(-1)[0] = torch.inf
    feed(optimizer, module, poisoned, torch.bfloat16)
    applied = optimizer.apply(scalar(1e-2), scalar(torch.nan if poison == "loss" else 1.0), scalar(1.0))
    assert applied.applied == 0.0
    assert all(torch.equal(state_of(optimizer)[name], tensor) for name, tensor in kept.items())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), computed, strict=True))


def test_without_a_sum_no_float32_gradient_is_kept() -> None:
    module = make_module()
    optimizer = DrafterOptimizer(module, SPEC, compute_dtype=torch.bfloat16, fused=FusedUpdate(adamw_update, False))
    assert optimizer._gradient.numel() == 0
    feed(optimizer, module, gradients(module, 0), torch.bfloat16)
    optimizer.apply(scalar(1e-2), scalar(1.0), scalar(1.0))
    assert optimizer._computed == [], "gradients are given back with the step"
    with pytest.raises(AssertionError, match="need a sum"):
        feed(optimizer, module, gradients(module, 1), torch.bfloat16, is_first=False)
