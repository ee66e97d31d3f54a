"""The warm-up of the real step on a GPU: gradients compared, every length run twice, then nothing compiles any more."""

import dataclasses
import sys

import pytest
import torch
from torch import Tensor

from drafter_trainer.flex_policy import compile_owned, compiled_graphs, graphs_declared, self_test
from drafter_trainer.gradient_check import GradientCheck
from drafter_trainer.heldout_matches import matched_slots
from drafter_trainer.warmup import adversarial_batches, load_representable_weights, run_steps, warm_up
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import EvalSpec
from tests.gpu.real_step import BLOCK, LENGTHS, VOCABULARY, real_plan, real_spec, real_step
from tests.gpu.test_flex_drafter import _policy  # noqa: F401 - a fixture, for every test here

CUDA = torch.device("cuda")


def test_a_warm_step_compiles_nothing_more_and_refuses_another_length(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    spec = real_spec(packs_per_step=2)
    self_test(CUDA)
    before = compiled_graphs()
    step, plan = real_step(spec), real_plan(spec)
    warm_up(step, plan, torch.bfloat16, vocab_size=VOCABULARY)
    said = {record.message: record.slipstream_fields for record in caplog.records}  # type: ignore[attr-defined]
    assert said["warmed_up"]["pack_lengths"] == LENGTHS, said
    declared = sum(graphs_declared()[name] for name in ("pack_layout", "drafter", "chunk_loss", "adamw"))
    assert compiled_graphs() - before == declared, said
    step.load_weights(step.first_weights(0))
    run_steps(step, adversarial_batches(CUDA, plan, torch.bfloat16, vocab_size=VOCABULARY))
    assert compiled_graphs() - before == declared
    longer = dataclasses.replace(plan, shorter_lengths=(), tensor_shapes=plan.shapes_of(2 * LENGTHS[-1]))
    with pytest.raises((RuntimeError, SlipstreamError)):
        run_steps(step, adversarial_batches(CUDA, longer, torch.bfloat16, vocab_size=VOCABULARY))


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_run_that_measures_is_warm_for_it(precision: str) -> None:
    """The graph without gradients computes what the trained one does; after the freeze nothing compiles."""
    spec = real_spec(precision).model_copy(update={"eval": EvalSpec(heldout="answers.jsonl")})
    before = compiled_graphs()
    step, plan = real_step(spec), real_plan(spec)
    warm_up(step, plan, torch.bfloat16, vocab_size=VOCABULARY)
    names = ("pack_layout", "drafter", "chunk_loss", "adamw", "drafter_without_gradients", "chunk_matches")
    declared = sum(graphs_declared()[name] for name in names)
    assert compiled_graphs() - before == declared
    step.load_weights(step.first_weights(0))
    for name, batch in adversarial_batches(CUDA, plan, torch.bfloat16, vocab_size=VOCABULARY):
        pack = batch.packs[0]
        targets = step.block_targets(pack)
        trained = step.hidden_states(pack, targets).detach()
        with torch.no_grad():
            laid_out = step._laid_out(pack.tensors, pack.anchors)
            drafted = step._hidden_of(pack.tensors, pack.anchors, laid_out, step._drafting)
        rows = pack.anchors.valid.repeat_interleave(BLOCK)
        distance = (drafted - trained)[rows].float().norm() / trained[rows].float().norm().clamp(min=1e-20)
        assert distance < {"bfloat16": 0.02, "float32": 1e-3}[precision], name
        # Labels that the trained graph chooses: the two may round differently, and a choice may hang on that.
        choices = (trained @ step.frozen.head.t()).argmax(dim=-1).view_as(targets.labels)
        chosen = targets._replace(labels=torch.empty_like(targets.labels).copy_(choices))
        most = targets.counted[:, 1:].long().cumprod(dim=1).sum(dim=1)
        matched = matched_slots(drafted, step._head, chosen, step._loss_config, step._chunk_matches)
        assert (matched <= most).all() and matched.sum() >= 0.7 * most.sum(), name
        assert torch.equal(
            step.matched(pack), matched_slots(drafted, step._head, targets, step._loss_config, step._chunk_matches)
        )
    assert compiled_graphs() - before == declared


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_gradients_are_as_near_as_plain_pytorchs(precision: str) -> None:
    spec = real_spec(precision)
    step, plan = real_step(spec, LENGTHS[:1]), real_plan(spec, LENGTHS[:1])
    load_representable_weights(step)
    check = GradientCheck(step)
    for _, batch in adversarial_batches(CUDA, plan, torch.bfloat16, vocab_size=VOCABULARY):
        check.add(batch.packs[0])
    errors = check.require_right()
    sys.stdout.write("\n".join(map(errors.in_words, errors.ours)) + "\n")
    assert not [errors.in_words(name) for name in errors.unexpected]


def test_a_wrong_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled function whose gradients, not its values, are a tenth too small."""
    spec = real_spec()
    step, plan = real_step(spec, LENGTHS[:1]), real_plan(spec, LENGTHS[:1])

    def wrong(*inputs: Tensor) -> Tensor:
        hidden = step._hidden_states(*inputs)  # type: ignore[arg-type]
        return hidden.detach() + 0.9 * (hidden - hidden.detach())

    monkeypatch.setattr(step, "_forward", compile_owned(wrong, name="wrong", graphs=1))
    with pytest.raises(SlipstreamError, match="gradients are wrong on this machine") as refused:
        warm_up(step, plan, torch.bfloat16, vocab_size=VOCABULARY)
    assert refused.value.reason is Reason.ENVIRONMENT_UNSUPPORTED
