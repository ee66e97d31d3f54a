"""Which recipes may go on from a checkpoint, and that a run keeps its length."""

from typing import Any

import pytest

from drafter_trainer.checkpoint_state import CheckpointState, Cursor, LoopState
from drafter_trainer.resume import check_same_length, check_same_run
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec

RECIPE: dict[str, Any] = {
    "name": "tiny",
    "target": {"model": "/a/model"},
    "data": {"files": ("/a/conversations.jsonl",), "pack_tokens": 128},
    "train": {"max_steps": 10},
}


def spec(**changes: dict[str, Any]) -> RunSpec:
    return RunSpec.model_validate(
        {key: {**value, **changes.pop(key, {})} if isinstance(value, dict) else value for key, value in RECIPE.items()}
        | changes
    )


def state_of(run: RunSpec) -> CheckpointState:
    return CheckpointState(
        run=run.name,
        incarnation=1,
        cursor=Cursor(next_step=5, first_sequence_number=0),
        loop=LoopState(),
        total_steps=10,
        target_fingerprint="f",
        stream="streams/s",
        spec=run.model_dump(mode="json"),
        versions={},
    )


@pytest.mark.parametrize(
    "change",
    [
        {"target": {"model": "/elsewhere/model"}},
        {"data": {"files": ("/elsewhere/conversations.jsonl",)}},
        {"train": {"device": "cpu", "attention": "sdpa", "max_not_finite_steps": 9}},
        {"stream": {"transport": "grpc", "prefetch_packs": 8}},
        {"checkpoint": {"every_steps": 7}},
        {"eval": {"max_new_tokens": 9}},
    ],
)
def test_what_is_not_learned_may_change(change: dict[str, Any]) -> None:
    check_same_run(state_of(spec()), spec(**change), where="checkpoint")


@pytest.mark.parametrize("now", ["exported", "/elsewhere/exported", "a/exported"])
def test_a_first_drafter_that_has_gone_or_moved_hinders_no_resume(now: str) -> None:
    """What a recipe calls `exported` is a path only as long as that is there."""
    check_same_run(state_of(spec(drafter={"init_from": "/a/exported"})), spec(drafter={"init_from": now}), where="here")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drafter": {"init_from": "/a/drafter"}}, "drafter.init_from: None in the checkpoint, '/a/drafter' now"),
        ({"train": {"max_steps": 20}}, "train.max_steps: 10 in the checkpoint, 20 now"),
        ({"train": {"seed": 3}}, "train.seed: 0 in the checkpoint, 3 now"),
        ({"train": {"packs_per_step": 2}}, "train.packs_per_step: 1 in the checkpoint, 2 now"),
        ({"optimizer": {"betas": (0.8, 0.95)}}, "optimizer.betas: [0.9, 0.95] in the checkpoint, [0.8, 0.95] now"),
        ({"loss": {"slot_weights": "dpace"}}, "loss.slot_weights: 'decay' in the checkpoint, 'dpace' now"),
        ({"data": {"seed": 1}}, "data.seed: 0 in the checkpoint, 1 now"),
        ({"drafter": {"block_size": 8}}, "drafter.block_size: 16 in the checkpoint, 8 now"),
    ],
)
def test_what_is_learned_may_not(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SlipstreamError) as refused:
        check_same_run(state_of(spec()), spec(**change), where="checkpoint")
    assert refused.value.reason is Reason.SPEC_INVALID
    assert words in refused.value.message and refused.value.message.count(" in the checkpoint, ") == 1


def test_a_definition_of_another_version_is_refused_in_words() -> None:
    state = state_of(spec())
    old = state.spec | {"train": state.spec["train"] | {"warm_start": True}, "loss": {"objective": "hinge"}}
    state = state.model_copy(update={"spec": old, "versions": {"slipstream": "0.0.1"}})
    with pytest.raises(SlipstreamError) as refused:
        check_same_run(state, spec(), where="runs/tiny/checkpoints/step-00000005")
    assert refused.value.reason is Reason.CHECKPOINT_INVALID and refused.value.exit_code == 11
    assert refused.value.message.startswith("runs/tiny/checkpoints/step-00000005 ")
    assert "train.warm_start: unknown key" in refused.value.message and "loss.objective: " in refused.value.message
    assert "Slipstream 0.0.1" in refused.value.remedy


def test_a_run_that_would_have_another_length_is_refused() -> None:
    check_same_length(state_of(spec()), 10)
    with pytest.raises(SlipstreamError, match="planned for 10 steps, its stream now gives 12") as refused:
        check_same_length(state_of(spec()), 12)
    assert refused.value.reason is Reason.STREAM_CHANGED and refused.value.exit_code == 8
