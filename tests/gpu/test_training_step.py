"""The real step on a GPU: recorded as CUDA graphs or not it learns the same, twice the same, and never waits."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.drafter_config import resolve_drafter_config
from drafter_trainer.frozen_weights import FrozenWeights
from drafter_trainer.step import PendingStep, TrainingStep
from drafter_trainer.training_packs import StepBatch, TrainingPack
from slipstream.run_spec.spec import DataSpec, DrafterSpec, LossSpec, OptimizerSpec, RunSpec, TargetSpec, TrainSpec
from tests.fakes.drafter_cases import MASK_TOKEN, packed
from tests.unit.trainer_runtime.test_step import TARGET

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, none is visible")

HIDDEN, VOCABULARY, ANCHORS, BLOCK = 128, 512, 32, 16
LENGTHS = (256, 384)
CUDA = torch.device("cuda", 0)
STEPS = 8


@pytest.fixture(autouse=True)
def _policy() -> Iterator[None]:
    from drafter_trainer import flex_policy

    torch._dynamo.reset()
    torch.cuda.set_device(CUDA)
    flex_policy.configure_compiler()
    yield
    torch.cuda.set_sync_debug_mode("default")


def make_spec(*, cuda_graphs: bool, packs_per_step: int = 1, kind: str = "adamw") -> RunSpec:
    return RunSpec(
        name="tiny",
        target=TargetSpec(model="m"),
        data=DataSpec(files=("d",), pack_tokens=max(LENGTHS)),
        drafter=DrafterSpec(num_layers=1, target_layer_ids=(1, 2), block_size=BLOCK, mask_token_id=MASK_TOKEN),
        train=TrainSpec(
            device="cuda",
            anchors_per_pack=ANCHORS,
            packs_per_step=packs_per_step,
            max_steps=10,
            cuda_graphs=cuda_graphs,
        ),
        loss=LossSpec(slot_weights="dpace", chunk_rows=120),
        optimizer=OptimizerSpec(kind=kind, ema_decay=0.9),
    )


def make_step(spec: RunSpec) -> TrainingStep:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = TARGET.model_copy(update=sizes | {"head_dim": 64, "vocab_size": VOCABULARY})
    generator = torch.Generator().manual_seed(5)
    embedding, head = (torch.randn(VOCABULARY, HIDDEN, generator=generator).to(CUDA, torch.bfloat16) for _ in range(2))
    frozen = FrozenWeights(embedding, 0.1 * head, torch.ones(HIDDEN, device=CUDA), 1.0)
    return TrainingStep(resolve_drafter_config(spec.drafter, target), frozen, spec, pack_lengths=LENGTHS)


def make_pack(number: int) -> TrainingPack:
    length = LENGTHS[number % len(LENGTHS)]
    pack = packed([100, 30, length - 150], length, seed=number)
    anchors = draw_anchors(pack["loss_mask"], pack["document_ids"], ANCHORS - number % 3, 0, number)
    missing = ANCHORS - len(anchors.valid)
    anchors = replace(
        anchors,
        positions=torch.cat((anchors.positions, torch.zeros(missing, dtype=torch.int64))),
        valid=torch.cat((anchors.valid, torch.zeros(missing, dtype=torch.bool))),
    )
    generator = torch.Generator().manual_seed(number)
    for name in ("hidden_states.1", "hidden_states.2"):
        pack[name] = torch.randn(length, HIDDEN, generator=generator).bfloat16()
    return TrainingPack(number, {name: tensor.to(CUDA) for name, tensor in pack.items()}, anchors.to(CUDA))


def batches(packs_per_step: int) -> list[StepBatch]:
    """Of a step's packs, lengths differ; the last step lacks one where there are several."""
    packs = [make_pack(number) for number in range(4)]
    numbers = [[(step + i) % 4 for i in range(packs_per_step)] for step in range(STEPS * len(LENGTHS))]
    numbers[-1] = numbers[-1][: max(1, packs_per_step - 1)]
    return [StepBatch(step, tuple(packs[number] for number in of_step)) for step, of_step in enumerate(numbers)]


def train(step: TrainingStep, packs_per_step: int) -> tuple[list[float], dict[str, Tensor]]:
    """From the first weights: the losses of the steps, then weights and state."""
    step.load_weights(step.first_weights(0))
    # The rate changes from step to step: a recorded update must not keep the one that it was recorded with.
    pending = [step.run(batch, 1e-3 / (1 + batch.step)) for batch in batches(packs_per_step)]
    numbers = [one.wait() for one in pending]
    assert all(one.applied for one in numbers)
    state = step.optimizer.deployed_weights() | step.optimizer.state_tensors()
    return [one.acceptance.loss for one in numbers], {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize(("packs_per_step", "kind"), [(1, "adamw"), (3, "adamw"), (1, "muon")])
def test_recorded_or_not_a_step_learns_the_same_and_always_the_same(packs_per_step: int, kind: str) -> None:
    plain = make_step(make_spec(cuda_graphs=False, packs_per_step=packs_per_step, kind=kind))
    losses, state = train(plain, packs_per_step)
    assert plain._recorder.recorded == ()

    step = make_step(make_spec(cuda_graphs=True, packs_per_step=packs_per_step, kind=kind))
    train(step, packs_per_step)
    parts = {("pack", length, "first") for length in LENGTHS} | {("update", packs_per_step)}
    if packs_per_step > 1:
        parts |= {("pack", length, "later") for length in LENGTHS}
    assert set(step._recorder.recorded) == parts
    recorded_losses, recorded_state = train(step, packs_per_step)
    again_losses, again_state = train(step, packs_per_step)

    assert recorded_losses == again_losses
    assert all(torch.equal(recorded_state[name], tensor) for name, tensor in again_state.items())
    assert recorded_losses == pytest.approx(losses, rel=2e-3)
    for name, tensor in state.items():
        distance = (recorded_state[name] - tensor).norm() / tensor.norm().clamp(min=1e-20)
        assert distance < 0.05, (name, distance.item())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_no_step_waits_for_the_gpu(cuda_graphs: bool, kind: str) -> None:
    step = make_step(make_spec(cuda_graphs=cuda_graphs, packs_per_step=2, kind=kind))
    train(step, 2)
    given = batches(2)
    pending: list[PendingStep] = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in given:
            pending.append(step.run(batch, 1e-3))
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.ones(1, device=CUDA).item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(one.wait().applied for one in pending)


def test_every_bucket_is_one_graph_of_each_function() -> None:
    from drafter_trainer import flex_policy

    step = make_step(make_spec(cuda_graphs=False))
    before = flex_policy.compiled_graphs()
    train(step, 1)
    # Layout and drafter for each length; the loss of a chunk does not depend on it, AdamW on sizes of parameters alone.
    sizes = {parameter.numel() for parameter in step.drafter.parameters()}
    assert flex_policy.compiled_graphs() - before == 2 * len(LENGTHS) + 1 + len(sizes)
