"""The comparison of a step's gradients with dense attention: what is right passes, what is slightly wrong is named.

The step here is the CPU's, by SDPA; compiled kernels are compared in tests/gpu/test_warm_up.py.
"""

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafter_trainer import gradient_check
from drafter_trainer.anchors import Anchors, BlockTargets
from drafter_trainer.block_mask import SdpaAttention
from drafter_trainer.build_step import hidden_state_names
from drafter_trainer.gradient_check import GradientCheck
from drafter_trainer.step import TrainingStep
from drafter_trainer.training_packs import PackPlan, TrainingPack, payload_shapes
from drafter_trainer.warmup import adversarial_batches, check_gradients, load_representable_weights, run_steps
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DrafterSpec, RunSpec
from tests.unit.trainer_runtime.test_step import ANCHORS, HIDDEN, TOKENS, make_config, make_frozen, make_pack, make_spec

CPU = torch.device("cpu")


def spec_of(precision: str) -> RunSpec:
    """Two layers, so that a gradient passes through attention; the second slides."""
    spec = make_spec(precision=precision)
    drafter = DrafterSpec(
        num_layers=2,
        target_layer_ids=(1, 2),
        block_size=4,
        layer_types=("full_attention", "sliding_attention"),
        sliding_window=24,
    )
    return spec.model_copy(update={"drafter": drafter})


def step_of(spec: RunSpec) -> TrainingStep:
    dtype = torch.float32 if spec.train.precision == "float32" else torch.bfloat16
    step = TrainingStep(make_config(spec), make_frozen(dtype), spec)
    load_representable_weights(step)
    return step


def plan_of(spec: RunSpec, shorter: tuple[int, ...] = ()) -> PackPlan:
    shapes = payload_shapes(hidden_state_names(spec, make_config(spec)), TOKENS, HIDDEN)
    return PackPlan(0, 1, 1, shapes, ANCHORS, 0, 2, 60.0, shorter)


def compare(step: TrainingStep, spec: RunSpec) -> GradientCheck:
    check = GradientCheck(step)
    for _, batch in adversarial_batches(CPU, plan_of(spec), torch.float32, vocab_size=90):
        check.add(batch.packs[0])
    return check


def distort(step: TrainingStep, monkeypatch: pytest.MonkeyPatch, change: Callable[[SdpaAttention], object]) -> None:
    """The run's own function gets another attention than its pack says; the references do not."""
    forward = step._forward

    def distorted(
        features: Tensor, ids: Tensor, positions: Tensor, block_positions: Tensor, attention: object
    ) -> Tensor:
        return forward(features, ids, positions, block_positions, change(attention))  # type: ignore[arg-type]

    monkeypatch.setattr(step, "_forward", distorted)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_right_step_passes_with_errors_of_its_precision(precision: str) -> None:
    spec = spec_of(precision)
    step = step_of(spec)
    before = {name: weight.clone() for name, weight in step.optimizer.weights().items()}
    errors = compare(step, spec).require_right()
    assert set(errors.ours) == {"hidden states", *before}
    for name, error in errors.ours.items():
        assert error <= (0.03 if precision == "bfloat16" else 1e-5), errors.in_words(name)
        assert error <= 1.2 * errors.plain[name] + 1e-9, errors.in_words(name)
    assert not errors.unexpected and not errors.wrong
    assert all(torch.equal(before[name], weight) for name, weight in step.optimizer.weights().items())
    assert all(parameter.grad is None for parameter in step.drafter.parameters())


def one_more_key(attention: SdpaAttention) -> SdpaAttention:
    assert attention.full is not None
    return replace(attention, full=attention.full | attention.full.roll(1, dims=1))


class WrongBackward(torch.autograd.Function):
    """Keys whose gradient lacks what one group of heads adds."""

    @staticmethod
    def forward(ctx: object, key: Tensor) -> Tensor:
        return key.clone()

    @staticmethod
    def backward(ctx: object, by_key: Tensor) -> Tensor:  # type: ignore[override]
        return by_key * torch.tensor([1.0, 0.9])[:, None, None].to(by_key.dtype)


@dataclasses.dataclass(frozen=True)
class Distorted:
    """Right values, wrong gradients: only a comparison of gradients sees it."""

    inner: SdpaAttention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sliding: bool) -> Tensor:
        return self.inner(query, WrongBackward.apply(key), value, sliding)


@pytest.mark.parametrize("change", [one_more_key, Distorted], ids=["a key too many", "a wrong backward"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_wrong_kernel_is_refused_in_words(
    precision: str, change: Callable[[SdpaAttention], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(precision)
    step = step_of(spec)
    distort(step, monkeypatch, change)
    check = compare(step, spec)
    with pytest.raises(SlipstreamError, match="gradients are wrong on this machine") as refused:
        check.require_right()
    assert refused.value.reason is Reason.ENVIRONMENT_UNSUPPORTED and "slipstream doctor" in refused.value.remedy
    wrong = check.errors().wrong
    assert set(wrong) <= set(check.errors().unexpected)
    # One key more is lost in bfloat16's rounding of the values, not of the gradients.
    assert ("hidden states" in wrong) == (change is one_more_key and precision == "float32")
    assert any("k_proj" in name for name in wrong)
    assert wrong[0] in refused.value.message and "allowed" in refused.value.message


def test_gradients_that_are_not_finite_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("bfloat16")
    step = step_of(spec)

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, hidden: Tensor) -> Tensor:
            return hidden.clone()

        @staticmethod
        def backward(ctx: object, by_hidden: Tensor) -> Tensor:  # type: ignore[override]
            return by_hidden * torch.where(by_hidden == 0, math.inf, 1.0)  # 0 · inf: rows that do not count

    plain = step.hidden_states
    monkeypatch.setattr(step, "hidden_states", lambda pack, targets: Poison.apply(plain(pack, targets)))
    with pytest.raises(SlipstreamError, match="error nan"):
        compare(step, spec).require_right()


def test_the_slice_has_the_gradient_of_its_rows_alone() -> None:
    """In float32, with a pack of several documents: exact, whatever the pack holds besides."""
    spec = spec_of("float32")
    step = step_of(spec)
    check = GradientCheck(step)
    for number in range(4):
        check.add(make_pack(number))
    errors = check.errors()
    assert max(errors.ours.values()) < 1e-5 and not errors.wrong


def test_every_pack_of_every_length_is_compared_and_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    spec = spec_of("float32")
    step = step_of(spec)
    shapes = payload_shapes(hidden_state_names(spec, make_config(spec)), 2 * TOKENS, HIDDEN)
    plan = replace(plan_of(spec), tensor_shapes=shapes, shorter_lengths=(TOKENS,))
    shapes_seen: list[int] = []
    forward = step._forward
    monkeypatch.setattr(step, "_forward", lambda *inputs: (shapes_seen.append(len(inputs[2])), forward(*inputs))[1])
    check_gradients(step, adversarial_batches(CPU, plan, torch.float32, vocab_size=90))
    assert shapes_seen == [TOKENS] * 5 + [2 * TOKENS] * 5, "the run's own function, in every declared shape"
    run_steps(step, adversarial_batches(CPU, plan, torch.float32, vocab_size=90))
    assert shapes_seen[10:] == shapes_seen[:10]
    (said,) = [record for record in caplog.records if record.message == "gradients_checked"]
    assert "allowed" in said.slipstream_fields["nearest_to_bound"]  # type: ignore[attr-defined]


def test_the_compared_anchors_are_spread_and_valid() -> None:
    step = step_of(spec_of("float32"))
    pack: TrainingPack = make_pack(0)
    targets: BlockTargets = step.block_targets(pack)
    part = GradientCheck(step)._slice(pack, targets)
    assert len(part.anchors.valid) == 4 and part.anchors.valid.all()
    valid = pack.anchors.valid.nonzero()[:, 0]
    compared = part.rows.view(ANCHORS, -1)[:, 0].nonzero()[:, 0]
    assert compared[0] == valid[0] and compared[-1] == valid[-1]
    nothing = replace(pack, anchors=Anchors(torch.zeros(ANCHORS, dtype=torch.int64), torch.zeros(ANCHORS).bool()))
    assert not GradientCheck(step)._slice(nothing, targets).anchors.valid.any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_warm_up_without_gradients_is_impossible(mode: Callable[[], AbstractContextManager[None]]) -> None:
    """Both of its parts end in a backward: a forward alone compiles nothing that a run could rely on."""
    spec = spec_of("float32")
    step = step_of(spec)
    for part in (check_gradients, run_steps):
        with mode(), pytest.raises(RuntimeError, match="does not require grad|inference tensor"):
            part(step, adversarial_batches(CPU, plan_of(spec), torch.float32, vocab_size=90))


def test_every_step_of_the_warm_up_has_gradients_and_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("float32")
    step = step_of(spec)
    seen: list[str] = []
    add, apply = step.optimizer.add_gradients, step.optimizer.apply
    monkeypatch.setattr(step.optimizer, "add_gradients", lambda *a, **k: (seen.append("gradients"), add(*a, **k))[1])
    monkeypatch.setattr(step.optimizer, "apply", lambda *a, **k: (seen.append("update"), apply(*a, **k))[1])
    run_steps(step, adversarial_batches(CPU, plan_of(spec), torch.float32, vocab_size=90))
    assert seen == ["gradients", "update"] * 5


def test_an_error_between_expected_and_wrong_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    spec = spec_of("bfloat16")
    step = step_of(spec)
    monkeypatch.setattr(gradient_check, "_EXPECTED", 0.5)
    monkeypatch.setattr(gradient_check, "_DEVIATIONS", 0.0)
    check_gradients(step, adversarial_batches(CPU, plan_of(spec), torch.float32, vocab_size=90))
    (warning,) = [record for record in caplog.records if record.message == "gradients_less_exact"]
    assert warning.levelname == "WARNING"
    assert "plain PyTorch" in warning.slipstream_fields["than_expected"]  # type: ignore[attr-defined]
