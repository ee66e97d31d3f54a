"""Muon on flat masters against torch's own, the moving average against its formula, and both through a checkpoint."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drafter_trainer.checkpoint import Checkpoint, load_checkpoint, load_drafter_weights, save_checkpoint
from drafter_trainer.flat_parameters import FlatLayout
from drafter_trainer.muon import batches_of, orthogonalised
from drafter_trainer.optimizer import DrafterOptimizer
from drafter_trainer.run_directory import RunDirectory
from drafter_trainer.schedule import learning_rate
from drafter_trainer.step import TrainingStep
from drafter_trainer.training_packs import StepBatch
from slipstream.run_spec.spec import OptimizerSpec, RunSpec
from tests.unit.trainer_runtime.test_checkpoint import make_checkpoint
from tests.unit.trainer_runtime.test_optimizer import feed, gradients, make_module, scalar
from tests.unit.trainer_runtime.test_step import make_config, make_frozen, make_pack, make_spec, make_step

MUON = OptimizerSpec(kind="muon", learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5)


def test_equals_torch_muon_for_matrices_and_adamw_for_the_rest() -> None:
    module, reference = make_module(), make_module()
    optimizer = DrafterOptimizer(module, MUON, compute_dtype=torch.float32)
    matrices = [p for p in reference.parameters() if p.dim() == 2]
    vectors = [p for p in reference.parameters() if p.dim() < 2]
    muon = torch.optim.Muon(matrices, lr=0.1, weight_decay=0.1, momentum=0.95)
    adamw = torch.optim.AdamW(vectors, lr=1e-2, betas=MUON.betas, eps=MUON.epsilon, weight_decay=0.0)
    for step in range(4):
        first, second = gradients(module, 2 * step), gradients(module, 2 * step + 1)
        feed(optimizer, module, first, torch.float32)
        feed(optimizer, module, second, torch.float32, is_first=False)
        applied = optimizer.apply(1e-2, scalar(1.0), scalar(3.0))
        for name, parameter in reference.named_parameters():
            parameter.grad = (first[name] + second[name]) / 3.0
        norm = nn.utils.clip_grad_norm_(reference.parameters(), MUON.clip_norm)
        muon.step()
        adamw.step()
        torch.testing.assert_close(applied.gradient_norm, norm)
    for (name, ours), (_, theirs) in zip(module.named_parameters(), reference.named_parameters(), strict=True):
        # The orthogonalisation is in bfloat16: a gradient that differs in its last bit can move a step by 2^-8 of it.
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_torch_muons_but_for_the_last_bit(dtype: torch.dtype) -> None:
    """With no clipping and a weight of 1 the gradient reaches Muon as it is; the step is rounded once more."""
    spec = OptimizerSpec(kind="muon", learning_rate=1e-2, muon_learning_rate=0.03, muon_momentum=0.9, clip_norm=1e6)
    module, reference = make_module(), make_module()
    optimizer = DrafterOptimizer(module, spec, compute_dtype=dtype)
    matrices = {name: p for name, p in reference.named_parameters() if p.dim() == 2}
    muon = torch.optim.Muon(matrices.values(), lr=0.03, weight_decay=0.0, momentum=0.9)
    for step in range(3):
        by_name = {name: gradient.to(dtype).float() for name, gradient in gradients(module, step).items()}
        feed(optimizer, module, by_name, dtype)
        optimizer.apply(1e-2, scalar(1.0), scalar(1.0))
        for name, parameter in matrices.items():
            parameter.grad = by_name[name]
        muon.step()
    for name, parameter in matrices.items():
        torch.testing.assert_close(optimizer.weights()[name], parameter.detach(), rtol=0.0, atol=1e-7)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, optimizer.weights()[name].to(dtype))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_matrices_together_become_what_torch_makes_of_each(shape: tuple[int, int]) -> None:
    """A step of torch's Muon from zero, without momentum and with a rate of 1, is the orthogonalised gradient."""
    generator = torch.Generator().manual_seed(3)
    matrices = torch.randn(5, *shape, generator=generator) * torch.logspace(-4, 4, 5)[:, None, None]
    matrices[1, :, 3] *= 1e-3
    matrices[4] = 0.0
    together = orthogonalised(matrices.bfloat16())
    for matrix, ours in zip(matrices, together, strict=True):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = matrix
        torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
        torch.testing.assert_close(-ours.float() * max(1.0, shape[0] / shape[1]) ** 0.5, parameter.detach())


def test_batches_hold_one_shape_and_are_bounded() -> None:
    layout = FlatLayout.of(
        [(str(n), nn.Parameter(torch.empty(shape, device="meta"))) for n, shape in enumerate([(4, 8), (8, 4)] * 3)]
        + [(str(6 + n), nn.Parameter(torch.empty(4096, 12288, device="meta"))) for n in range(2)]
    )
    assert batches_of(layout) == [[0, 2, 4], [1, 3, 5], [6], [7]]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_rate_on_the_device_makes_the_same_step(weight_decay: float) -> None:
    """What a recorded step gives."""
    spec = MUON.model_copy(update={"weight_decay": weight_decay})
    modules = make_module(), make_module()
    for module, rate in zip(modules, (1e-2, torch.tensor(1e-2)), strict=True):
        optimizer = DrafterOptimizer(module, spec, compute_dtype=torch.float32)
        for step in range(2):
            feed(optimizer, module, gradients(module, step), torch.float32)
            optimizer.apply(rate, scalar(1.0), scalar(1.0))
    for ours, theirs in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-7)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_what_is_not_finite_changes_neither_momentum_nor_average(poison: str) -> None:
    module = make_module()
    spec = MUON.model_copy(update={"ema_decay": 0.9})
    optimizer = DrafterOptimizer(module, spec, compute_dtype=torch.float32)
    feed(optimizer, module, gradients(module, 0), torch.float32)
    optimizer.apply(1e-2, scalar(1.0), scalar(1.0))
    kept = {name: t.clone() for name, t in (optimizer.state_tensors() | optimizer.deployed_weights()).items()}
    poisoned = gradients(module, 1)
    if poison == "gradient":
        poisoned["0.weight"][0, 0] = torch.inf
    feed(optimizer, module, poisoned, torch.float32)
    applied = optimizer.apply(1e-2, scalar(torch.nan if poison == "loss" else 1.0), scalar(1.0))
    assert applied.applied == 0.0
    now = optimizer.state_tensors() | optimizer.deployed_weights()
    assert kept.keys() == now.keys() and all(torch.equal(kept[name], tensor) for name, tensor in now.items())


def test_the_average_follows_its_formula() -> None:
    module = make_module()
    spec = OptimizerSpec(learning_rate=1e-2, ema_decay=0.4)
    optimizer = DrafterOptimizer(module, spec, compute_dtype=torch.bfloat16)
    expected = {name: weight.double() for name, weight in optimizer.weights().items()}
    for step in range(6):
        feed(optimizer, module, gradients(module, step), torch.float32)
        optimizer.apply(1e-2, scalar(1.0), scalar(1.0))
        decay = min(0.4, (2 + step) / (11 + step))
        expected = {name: decay * expected[name] + (1 - decay) * w for name, w in optimizer.weights().items()}
    average = optimizer.deployed_weights()
    for name, weight in expected.items():
        assert average[name].dtype is torch.float32
        torch.testing.assert_close(average[name].double(), weight, rtol=1e-6, atol=1e-7)
        assert not torch.equal(average[name], optimizer.weights()[name])


def test_without_an_average_the_masters_are_deployed() -> None:
    optimizer = DrafterOptimizer(make_module(), MUON, compute_dtype=torch.float32)
    deployed = optimizer.deployed_weights()
    assert all(deployed[name].data_ptr() == weight.data_ptr() for name, weight in optimizer.weights().items())
    assert not any(key.startswith("master.") for key in optimizer.state_tensors())


def run_spec(kind: str, precision: str, ema_decay: float | None) -> RunSpec:
    spec = make_spec(packs_per_step=2, precision=precision, slot_weights="dpace", objective="lk_hybrid")
    optimizer = OptimizerSpec(kind=kind, learning_rate=2e-3, schedule="wsd", decay_fraction=0.5, ema_decay=ema_decay)
    return spec.model_copy(
        update={"optimizer": optimizer, "train": spec.train.model_copy(update={"feature_noise": 0.05})}
    )


def train(step: TrainingStep, spec: RunSpec, steps: range, total: int) -> list[str]:
    losses = []
    for number in steps:
        packs = (make_pack(2 * number), make_pack(2 * number + 1))
        pending = step.run(StepBatch(number, packs), learning_rate(spec.optimizer, number, total))
        losses.append(pending.wait().acceptance.loss.hex())
    return losses


def saved(step: TrainingStep, directory: Path) -> Checkpoint:
    run = RunDirectory(directory)
    run.claim(1, "trainers/a")
    blank = make_checkpoint(4)
    save_checkpoint(
        run,
        Checkpoint(blank.state, "{}", step.optimizer.deployed_weights(), step.optimizer.state_tensors(), blank.rng),
        keep=1,
    )
    return load_checkpoint(run.checkpoints / "step-00000004")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("ema_decay", [None, 0.99])
def test_a_resumed_run_is_bit_equal(kind: str, precision: str, ema_decay: float | None, tmp_path: Path) -> None:
    spec = run_spec(kind, precision, ema_decay)
    straight = make_step(spec)
    losses = train(straight, spec, range(8), 8)

    first = make_step(spec)
    before = train(first, spec, range(4), 8)
    checkpoint = saved(first, tmp_path)
    second = TrainingStep(
        make_config(spec), make_frozen(torch.float32 if precision == "float32" else torch.bfloat16), spec
    )
    # What a warm-up leaves behind must not matter.
    second.load_weights(second.first_weights(5))
    train(second, spec, range(2), 8)
    second.load_weights(checkpoint.drafter)
    second.optimizer.load_state(checkpoint.optimizer)
    assert before + train(second, spec, range(4, 8), 8) == losses

    def everything(step: TrainingStep) -> dict[str, Tensor]:
        optimizer = step.optimizer
        masters = {f"weights.{name}": weight for name, weight in optimizer.weights().items()}
        return optimizer.state_tensors() | masters | optimizer.deployed_weights()

    expected, found = everything(straight), everything(second)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_what_evaluation_reads_is_the_average(tmp_path: Path) -> None:
    spec = run_spec("muon", "float32", 0.99)
    step = make_step(spec)
    train(step, spec, range(4), 8)
    saved(step, tmp_path)
    _, weights = load_drafter_weights(RunDirectory(tmp_path).checkpoints / "step-00000004")
    average, masters = step.optimizer.deployed_weights(), step.optimizer.weights()
    assert all(torch.equal(weights[name], average[name]) for name in masters)
    assert not torch.equal(weights["fc.weight"], masters["fc.weight"])


def test_the_loss_falls_with_muon() -> None:
    spec = run_spec("muon", "float32", None)
    step = make_step(spec)
    losses = [step.run(StepBatch(0, (make_pack(0), make_pack(1))), 2e-3).wait().acceptance.loss for _ in range(12)]
    assert losses[-1] < 0.9 * losses[0]


def test_muon_steps_after_compilation_is_forbidden() -> None:
    """Nothing of torch's optimizer is compiled behind our back: a frozen process can step."""
    from drafter_trainer.flex_policy import CompilationFreeze

    module = make_module()
    optimizer = DrafterOptimizer(module, MUON, compute_dtype=torch.float32)
    CompilationFreeze().freeze()
    try:
        feed(optimizer, module, gradients(module, 0), torch.float32)
        assert optimizer.apply(1e-2, scalar(1.0), scalar(1.0)).applied == 1.0
    finally:
        torch._dynamo.callback.callback_handler.clear()
        torch.compiler.set_stance("default")
