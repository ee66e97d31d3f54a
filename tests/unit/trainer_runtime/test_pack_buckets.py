"""Packs of several lengths: padded to the next bucket, they train as they would alone."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.batch_source import BatchSource
from drafter_trainer.pack_buckets import bucket_of, declared_lengths, padded_to
from drafter_trainer.step import TrainingStep
from drafter_trainer.training_packs import PackPlan, StepBatch, TrainingPack, payload_shapes
from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.run_spec.reasons import Reason
from tests.unit.trainer_runtime.test_step import (
    ANCHORS,
    HIDDEN,
    TOKENS,
    make_config,
    make_frozen,
    make_pack,
    make_spec,
)


def test_buckets_are_ascending_multiples_of_a_tile() -> None:
    lengths = declared_lengths((4096, 896, 2048, 8192, 896))
    assert lengths == (896, 2048, 4096, 8192)
    assert [bucket_of(n, lengths) for n in (1, 770, 896, 2000, 4000, 8192, 8193)] == [
        896, 896, 896, 2048, 4096, 8192, None,
    ]  # fmt: skip
    for wrong in ((), (0,), (770,)):
        with pytest.raises(AssertionError):
            declared_lengths(wrong)


def test_a_plan_knows_the_shapes_of_every_bucket() -> None:
    shapes = payload_shapes(("hidden_states.1",), 512, HIDDEN)
    plan = PackPlan(0, 1, 1, shapes, ANCHORS, 0, 2, 60.0, shorter_lengths=(128, 256))
    assert plan.pack_lengths == (128, 256, 512)
    assert plan.shapes_of(512) == shapes
    assert plan.shapes_of(256)["hidden_states.1"] == (256, HIDDEN)
    assert replace(plan, shorter_lengths=()).pack_lengths == (512,)


def test_padding_is_nobodys_and_costs_no_copy_where_nothing_is_missing() -> None:
    pack = make_pack(0).tensors
    assert all(padded_to(pack, TOKENS)[name] is tensor for name, tensor in pack.items())
    padded = padded_to(pack, 384)
    assert padded["document_ids"].tolist() == pack["document_ids"].tolist() + [-1] * 256
    assert not padded["loss_mask"][TOKENS:].any() and not padded["hidden_states.1"][TOKENS:].any()
    assert {name: tensor.dtype for name, tensor in padded.items()} == {name: t.dtype for name, t in pack.items()}


def test_a_padded_pack_learns_the_same() -> None:
    short = make_pack(3)
    tensors = padded_to(short.tensors, 256)
    anchors = draw_anchors(tensors["loss_mask"], tensors["document_ids"], ANCHORS, 0, 3)
    assert torch.equal(anchors.positions, short.anchors.positions)
    spec = make_spec()
    step = TrainingStep(make_config(spec), make_frozen(), spec, pack_lengths=(TOKENS, 256))
    results = []
    for pack in (short, TrainingPack(3, tensors, anchors)):
        step.load_weights(step.first_weights(0))
        numbers = step.run(StepBatch(0, (pack,)), 1e-3).wait()
        results.append((numbers, {name: weight.clone() for name, weight in step.optimizer.weights().items()}))
    (alone, weights), (padded, padded_weights) = results
    assert padded.acceptance.loss == pytest.approx(alone.acceptance.loss, rel=1e-6)
    assert padded.acceptance.blocks == alone.acceptance.blocks
    assert padded.gradient_norm == pytest.approx(alone.gradient_norm, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(padded_weights[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "shorter", "words"),
    [
        (640, (128, 256), r"input_ids \[640\] \(expected \[512\]\).*Declared are packs of 128, 256, 512 tokens"),
        (256, (), r"input_ids \[256\] \(expected \[512\]\).*Declared are packs of 512 tokens"),
        (0, (128,), "input_ids missing"),
    ],
)
def test_a_pack_outside_the_buckets_is_refused_before_anything_of_it_is_read(
    tokens: int, shorter: tuple[int, ...], words: str
) -> None:
    plan = PackPlan(0, 1, 1, payload_shapes((), 512, HIDDEN), ANCHORS, 0, 2, 60.0, shorter_lengths=shorter)
    nothing: Any = None
    source = BatchSource(nothing, plan, nothing, threading.Event())
    manifest = batch_pb2.PackManifest(sequence_number=7)
    if tokens:
        for name, shape in plan.shapes_of(tokens).items():
            manifest.tensors.add(name=name, shape=shape)
    with pytest.raises(SlipstreamError, match=f"Pack 7 does not fit the compiled step: {words}") as refused:
        source._bucket_of(manifest)
    assert refused.value.reason is Reason.PACK_OUTSIDE_BUCKETS
