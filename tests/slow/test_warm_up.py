"""The whole warm-up, with the graphs that a GPU gets, run operation by operation on the CPU: no kernel is generated.

flex_attention is traced with its gradient and evaluated densely here; so the tripwire is not set.
"""

import functools
import importlib
from collections.abc import Iterator

import pytest
import torch

from drafter_trainer import flex_policy
from drafter_trainer.flex_policy import compile_owned, compiled_graphs
from drafter_trainer.heldout_matches import matches_of_chunk
from drafter_trainer.loss import loss_of_chunk
from drafter_trainer.step import TrainingStep
from drafter_trainer.training_packs import PackPlan, StepBatch, payload_shapes
from drafter_trainer.warmup import adversarial_batches, warm_up
from slipstream.errors import SlipstreamError
from slipstream.run_spec.spec import EvalSpec, RunSpec
from tests.unit.trainer_runtime.test_gradient_check import spec_of
from tests.unit.trainer_runtime.test_step import ANCHORS, HIDDEN, make_config, make_frozen

LENGTHS = (128, 256)


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    # It refuses gradients on a CPU, where no compiled backward exists.
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    yield
    torch._dynamo.callback.callback_handler.clear()
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def compiled_step(spec: RunSpec, lengths: tuple[int, ...]) -> TrainingStep:
    """As `TrainingStep` compiles itself on CUDA."""
    train = spec.train.model_copy(update={"attention": "flex"})
    step = TrainingStep(make_config(spec), make_frozen(), spec.model_copy(update={"train": train}), lengths)
    step._lay_out = compile_owned(step._layout.__call__, name="pack_layout", graphs=len(lengths))
    step._forward = compile_owned(step._hidden_states, name="drafter", graphs=len(lengths))
    step._chunk_loss = compile_owned(loss_of_chunk, name="chunk_loss", graphs=1)
    if step.measures:
        step._drafting = compile_owned(step._hidden_states, name="drafter_without_gradients", graphs=len(lengths))
        step._chunk_matches = compile_owned(matches_of_chunk, name="chunk_matches", graphs=1)
    return step


def plan_of(spec: RunSpec) -> PackPlan:
    shapes = payload_shapes(make_config(spec).feature_names, LENGTHS[-1], HIDDEN)
    return PackPlan(0, 1, 1, shapes, ANCHORS, 0, 2, 60.0, LENGTHS[:-1])


def test_the_declared_graphs_are_compiled_and_then_no_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    spec = spec_of("float32").model_copy(update={"eval": EvalSpec(heldout="answers.jsonl")})
    step, plan = compiled_step(spec, LENGTHS), plan_of(spec)
    before = compiled_graphs()
    warm_up(step, plan, torch.float32, vocab_size=90)
    said = {record.message: record.slipstream_fields for record in caplog.records}  # type: ignore[attr-defined]
    assert said["warmed_up"]["pack_lengths"] == LENGTHS
    declared = flex_policy.graphs_declared()
    names = ("pack_layout", "drafter", "chunk_loss", "drafter_without_gradients", "chunk_matches")
    assert compiled_graphs() - before == sum(declared[name] for name in names) == 3 * len(LENGTHS) + 2
    assert "drafter 2" in said["warmed_up"]["declared"]
    # Any pack of a declared length trains from now on, and is measured; weights are loaded in place.
    step.load_weights(step.first_weights(0))
    dense = TrainingStep(make_config(spec), make_frozen(), spec, LENGTHS)
    batches = [batch for _, batch in adversarial_batches(step.device, plan, torch.float32, vocab_size=90)]
    for number, batch in enumerate(reversed(batches)):
        assert step.run(StepBatch(number, batch.packs), 1e-3).wait().applied
        dense.load_weights(step.optimizer.weights())
        assert torch.equal(step.matched(batch.packs[0]), dense.matched(batch.packs[0]))
    assert compiled_graphs() - before == 3 * len(LENGTHS) + 2

    longer = PackPlan(0, 1, 1, plan.shapes_of(384), ANCHORS, 0, 2, 60.0)
    (_, batch), *_ = adversarial_batches(step.device, longer, torch.float32, vocab_size=90)
    with pytest.raises((RuntimeError, SlipstreamError), match="fail_on_recompile|for packs of 128, 256 tokens"):
        step.run(batch, 1e-3)
