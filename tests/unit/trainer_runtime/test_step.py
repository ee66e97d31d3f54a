"""The real step on the CPU: what a step of several packs learns, adversarial packs, and input that is not finite."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drafter_trainer.anchors import build_block_targets, draw_anchors
from drafter_trainer.block_mask import build_block_attention
from drafter_trainer.build_step import hidden_state_names
from drafter_trainer.drafter import DFlashDrafter
from drafter_trainer.drafter_config import DrafterConfig, resolve_drafter_config
from drafter_trainer.frozen_weights import FrozenWeights
from drafter_trainer.loss import drafter_loss, resolve_loss_config
from drafter_trainer.step import TrainingStep
from drafter_trainer.training_packs import PackPlan, StepBatch, TrainingPack, payload_shapes
from drafter_trainer.warmup import adversarial_batches
from slipstream.run_spec.spec import DataSpec, DrafterSpec, LossSpec, OptimizerSpec, RunSpec, TargetSpec, TrainSpec
from slipstream.wire.target_config import TargetConfig

TOKENS, HIDDEN, VOCABULARY, ANCHORS, BLOCK = 128, 32, 96, 16, 4

TARGET = TargetConfig(
    model_type="llama",
    num_layers=4,
    hidden_size=HIDDEN,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    embedding_scale=2.0,
    logit_soft_cap=None,
    norm_weight_offset=0.0,
    tokenizer_length=90,
    mask_token_id=None,
    special_tokens={},
)


def make_spec(
    packs_per_step: int = 1,
    precision: str = "float32",
    slot_weights: str = "decay",
    objective: str = "cross_entropy",
) -> RunSpec:
    return RunSpec(
        name="tiny",
        target=TargetSpec(model="m", dtype="float32"),
        data=DataSpec(files=("d",), pack_tokens=TOKENS),
        drafter=DrafterSpec(num_layers=1, target_layer_ids=(1, 2), block_size=BLOCK),
        train=TrainSpec(
            device="cpu",
            attention="sdpa",
            precision=precision,
            anchors_per_pack=ANCHORS,
            packs_per_step=packs_per_step,
            max_steps=10,
        ),
        loss=LossSpec(slot_weights=slot_weights, objective=objective),
    )


def make_config(spec: RunSpec) -> DrafterConfig:
    return resolve_drafter_config(spec.drafter, TARGET)


def make_frozen(dtype: torch.dtype = torch.float32) -> FrozenWeights:
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randn, VOCABULARY, HIDDEN, generator=generator)
    return FrozenWeights(draw().to(dtype), draw().to(dtype), torch.ones(HIDDEN), TARGET.embedding_scale)


def make_step(spec: RunSpec) -> TrainingStep:
    dtype = torch.float32 if spec.train.precision == "float32" else torch.bfloat16
    step = TrainingStep(make_config(spec), make_frozen(dtype), spec)
    step.load_weights(step.first_weights(spec.train.seed))
    return step


def make_pack(number: int, *, supervised: float = 0.7) -> TrainingPack:
    generator = torch.Generator().manual_seed(number)
    lengths = (50, 60)
    documents = torch.full((TOKENS,), -1, dtype=torch.int32)
    positions = torch.zeros(TOKENS, dtype=torch.int32)
    start = 0
    for index, length in enumerate(lengths):
        documents[start : start + length] = index
        positions[start : start + length] = torch.arange(length, dtype=torch.int32)
        start += length
    mask = ((torch.rand(TOKENS, generator=generator) < supervised) & (documents >= 0)).to(torch.uint8)
    tensors = {
        "input_ids": torch.randint(90, (TOKENS,), generator=generator).int(),
        "loss_mask": mask,
        "document_ids": documents,
        "position_ids": positions,
        "hidden_states.1": torch.randn(TOKENS, HIDDEN, generator=generator),
        "hidden_states.2": torch.randn(TOKENS, HIDDEN, generator=generator),
        "last_hidden_state": torch.randn(TOKENS, HIDDEN, generator=generator),
    }
    return TrainingPack(number, tensors, draw_anchors(mask, documents, ANCHORS, 0, number))


def gradients_over_the_whole_step(spec: RunSpec, packs: list[TrainingPack]) -> tuple[float, float]:
    """(loss, gradient norm) of Σ numerators / Σ weights, in one backward pass over plain parameters."""
    config, frozen = make_config(spec), make_frozen()
    drafter = DFlashDrafter(config)
    drafter.load_state_dict(make_step(spec).first_weights(spec.train.seed))
    loss_config = resolve_loss_config(
        spec.loss, block_size=BLOCK, vocab_size=VOCABULARY, logit_soft_cap=None, device=torch.device("cpu")
    )
    numerator, weight = torch.zeros(()), torch.zeros(())
    for pack in packs:
        targets = build_block_targets(pack.tensors, pack.anchors, block_size=BLOCK, mask_token_id=config.mask_token_id)
        positions = pack.tensors["position_ids"]
        hidden = drafter(
            torch.cat([pack.tensors[name] for name in config.feature_names], dim=-1),
            2.0 * frozen.embedding[targets.block_ids.flatten()],
            positions,
            targets.block_positions.flatten(),
            build_block_attention(drafter.attention_layout("sdpa"), pack.anchors, positions),
        )
        sums = drafter_loss(hidden, frozen.head, targets, loss_config)
        numerator, weight = numerator + sums.numerator, weight + sums.weight
    (numerator / weight).backward()
    gradients = [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
    return (numerator / weight).item(), norm.item()


@pytest.mark.parametrize("slot_weights", ["decay", "dpace"])
def test_packs_of_a_step_weigh_by_their_counted_slots(slot_weights: str) -> None:
    spec = make_spec(packs_per_step=3, slot_weights=slot_weights)
    packs = [make_pack(0), make_pack(1, supervised=0.3), make_pack(2, supervised=0.95)]
    numbers = make_step(spec).run(StepBatch(0, tuple(packs)), 1e-3).wait()
    loss, norm = gradients_over_the_whole_step(spec, packs)
    assert numbers.acceptance.loss == pytest.approx(loss, rel=1e-5)
    assert numbers.gradient_norm == pytest.approx(norm, rel=1e-4)
    assert numbers.applied and numbers.not_finite == ()


def test_the_loss_falls_when_a_pack_is_trained_again_and_again() -> None:
    for precision in ("float32", "bfloat16"):
        step = make_step(make_spec(precision=precision))
        losses = [step.run(StepBatch(0, (make_pack(0),)), 1e-2).wait().acceptance.loss for _ in range(8)]
        assert losses[-1] < losses[0] - 0.5, precision


@pytest.mark.parametrize("slot_weights", ["uniform", "decay", "dpace"])
@pytest.mark.parametrize("objective", ["cross_entropy", "kl", "tv"])
def test_adversarial_packs_are_finite_and_change_weights_only_where_something_counts(
    slot_weights: str, objective: str
) -> None:
    spec = make_spec(packs_per_step=2, slot_weights=slot_weights, objective=objective)
    step, config = make_step(spec), make_config(spec)
    plan = PackPlan(0, 2, 1, payload_shapes(hidden_state_names(spec, config), TOKENS, HIDDEN), ANCHORS, 0, 2, 60.0)
    names = []
    for name, batch in adversarial_batches(torch.device("cpu"), plan, torch.float32, vocab_size=90):
        step.load_weights(step.first_weights(0))
        # Of the block's side: the one anchor is the first token, which has no context to learn from.
        first = step.optimizer.weights()["layers.0.mlp.down_proj.weight"].clone()
        numbers = step.run(batch, 1e-3).wait()
        names.append(name)
        assert numbers.applied and math.isfinite(numbers.acceptance.loss), name
        assert (numbers.gradient_norm > 0) == (not name.startswith("no valid anchor"))
        changed = not torch.equal(step.optimizer.weights()["layers.0.mlp.down_proj.weight"], first)
        assert changed == (not name.startswith("no valid anchor")), name
    assert len(names) == 5


def test_the_pack_that_is_not_finite_is_named_and_nothing_changes() -> None:
    spec = make_spec(packs_per_step=2)
    step = make_step(spec)
    bad = make_pack(7)
    poisoned = bad.tensors["hidden_states.2"].clone()
    poisoned[3] = math.inf
    bad = replace(bad, tensors={**bad.tensors, "hidden_states.2": poisoned})
    before = {name: weight.clone() for name, weight in step.optimizer.weights().items()}
    numbers = step.run(StepBatch(0, (make_pack(6), bad)), 1e-2).wait()
    assert not numbers.applied and numbers.not_finite == (7,)
    assert math.isnan(numbers.acceptance.loss)
    assert all(torch.equal(before[name], weight) for name, weight in step.optimizer.weights().items())
    assert step.run(StepBatch(1, (make_pack(6), make_pack(8))), 1e-2).wait().applied


@pytest.mark.parametrize("objective", ["kl", "lk_hybrid"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_learns_the_targets_distribution(objective: str, precision: str) -> None:
    step = make_step(make_spec(precision=precision, objective=objective))
    losses = [step.run(StepBatch(0, (make_pack(0),)), 1e-2).wait().acceptance.loss for _ in range(8)]
    assert 0 < losses[-1] < 0.9 * losses[0]


def test_the_targets_last_state_is_read_only_where_the_objective_needs_it() -> None:
    for objective, needed in (("cross_entropy", False), ("tv", True)):
        spec = make_spec(objective=objective)
        names = hidden_state_names(spec, make_config(spec))
        assert names == ("hidden_states.1", "hidden_states.2", *(("last_hidden_state",) if needed else ()))
    pack = make_pack(0)
    without = replace(pack, tensors={k: v for k, v in pack.tensors.items() if k != "last_hidden_state"})
    assert make_step(make_spec()).run(StepBatch(0, (without,)), 1e-2).wait().applied
    with pytest.raises(KeyError, match="last_hidden_state"):
        make_step(make_spec(objective="tv")).run(StepBatch(0, (without,)), 1e-2)


@pytest.mark.parametrize("again", [True, 1])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_layers_that_are_computed_again_learn_the_same_bits(precision: str, again: bool | int) -> None:
    spec = make_spec(packs_per_step=2, precision=precision)
    spec = spec.model_copy(update={"drafter": spec.drafter.model_copy(update={"num_layers": 2})})
    train = spec.train.model_copy(update={"activation_checkpointing": again})
    kept, recomputed = make_step(spec), make_step(spec.model_copy(update={"train": train}))
    assert recomputed.drafter.recomputed_layers == (2 if again is True else 1)
    for number in range(3):
        batch = StepBatch(number, (make_pack(2 * number), make_pack(2 * number + 1)))
        assert kept.run(batch, 1e-3).wait() == recomputed.run(batch, 1e-3).wait()
    for name, weight in kept.optimizer.weights().items():
        assert torch.equal(recomputed.optimizer.weights()[name], weight), name


class HostSync(TorchDispatchMode):
    """Refuses what makes the host wait for a GPU: reading a value, or a shape that depends on values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = function.name()
        assert name not in {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}, name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("objective", ["cross_entropy", "kl", "lk_hybrid"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_no_step_waits_for_the_device(objective: str, kind: str) -> None:
    spec = make_spec(packs_per_step=2, objective=objective, slot_weights="dpace", precision="bfloat16")
    spec = spec.model_copy(
        update={
            "optimizer": OptimizerSpec(kind=kind, ema_decay=0.9),
            "train": spec.train.model_copy(update={"feature_noise": 0.1}),
        }
    )
    step = make_step(spec)
    # The loss of fixed shapes, as on a GPU; the masks of SDPA are the CPU's own.
    step._loss_config = replace(step._loss_config, only_counted_rows=False)
    batch = StepBatch(0, (make_pack(0), make_pack(1)))
    with HostSync():
        pending = step.run(batch, 1e-3)
    assert pending.wait().applied
    with HostSync(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        pending._values[0].item()


def test_first_weights_depend_on_the_seed_alone() -> None:
    step = make_step(make_spec())
    torch.manual_seed(123)
    again, other = step.first_weights(0), step.first_weights(1)
    assert all(torch.equal(step.optimizer.weights()[name], weight) for name, weight in again.items())
    assert not torch.equal(again["fc.weight"], other["fc.weight"])
    assert torch.equal(other["norm.weight"], torch.ones(HIDDEN))
