"""What measuring held-out acceptance costs: as many packs and forwards as the real packer and the trainer make."""

import json
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter_trainer.heldout import HeldoutEvaluation
from slipstream.errors import SlipstreamError
from slipstream.heldout_rows import load_rows
from slipstream.plan.cost import checkpoint_bytes, forward_flop, plan_cost, step_flop
from slipstream.plan.gpus import H200
from slipstream.plan.heldout import HeldoutAnswers, heldout_cost, read_answers
from slipstream.plan.memory import plan_memory
from slipstream.plan.report import plan_run
from slipstream.plan.sizes import TargetSizes
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from target_server.packing import best_fit_decreasing
from tests.unit.plan.sizes import H200_BYTES, SIZES, C

TARGET = TargetSizes(
    num_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    vocab_size=49_152, tie_word_embeddings=True,
)  # fmt: skip


WHOSE = {"source": "news", "target_fingerprint": "f"}


def spec_of(heldout: Path | None, every_steps: int | None = None, pack_tokens: int = 1024) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "measured",
            "target": {"model": "m"},
            "data": {"files": ["a.jsonl"], "pack_tokens": pack_tokens},
            "train": {"device": "cuda", "max_steps": 1000, "anchors_per_pack": 64},
            "checkpoint": {"every_steps": 300, "keep": 2},
            "eval": {"heldout": heldout and str(heldout), "every_steps": every_steps},
        }
    )


def row(prompt: int, answer: int, **changes: object) -> str:
    made = {"input_ids": [1] * (prompt + answer), "loss_mask": [0] * prompt + [1] * answer}
    return json.dumps(WHOSE | made | changes)


@pytest.fixture
def heldout(tmp_path: Path) -> Path:
    draw = random.Random(0)
    path = tmp_path / "heldout.jsonl"
    path.write_text("".join(row(draw.randint(20, 500), draw.randint(2, 200)) + "\n" for _ in range(200)))
    return path


def test_packs_and_forwards_are_those_that_are_made(heldout: Path) -> None:
    spec = spec_of(heldout)
    answers = read_answers(spec)
    assert answers is not None and len(answers.rows) == 200
    sizes = replace(C, pack_tokens=1024, anchors_per_pack=64)
    cost = heldout_cost(spec, sizes, answers, forward_seconds=1.0, total_steps=None)
    packs = best_fit_decreasing(range(200), [tokens for tokens, _ in answers.rows], 1024)
    evaluation = HeldoutEvaluation([], "", num_anchors=64, block_size=8, stop=threading.Event())
    positions = [sum(answers.rows[index][1] for index in pack) for pack in packs]
    assert cost.packs == len(packs)
    # The largest first, so that ties may put other answers together: a forward more or less.
    forwards = sum(len(list(evaluation._anchors(torch.arange(count)))) for count in positions)
    assert cost.forwards == pytest.approx(forwards, abs=3)
    assert cost.host_bytes == len(packs) * sizes.pack_bytes and cost.seconds > cost.forwards
    assert cost.measurements is None and cost.total_seconds is None


@pytest.mark.parametrize(("every_steps", "measurements"), [(None, 4), (250, 4), (999, 2), (2000, 1)])
def test_the_end_is_always_measured(every_steps: int | None, measurements: int) -> None:
    spec, answers = spec_of(Path("h.jsonl"), every_steps), HeldoutAnswers(((20, 9),))
    cost = heldout_cost(spec, C, answers, forward_seconds=0.5, total_steps=1000)
    assert cost.measurements == measurements and cost.total_seconds == measurements * cost.seconds


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recorded", [False, True])
def test_memory_of_a_measurement(size: str, recorded: bool) -> None:
    sizes = replace(SIZES[size], cuda_graphs=recorded, needs_target_distribution=True)
    without, plan = (plan_memory(replace(sizes, measures=measures), H200_BYTES) for measures in (False, True))
    assert set(plan.phases) - set(without.phases) == {"measurement"}
    assert {phase: plan.phases[phase] for phase in without.phases} == without.phases
    # A recorded step keeps its memory while something else computes; else the allocator gives it out again.
    assert (plan.worst_phase == "measurement") is recorded and (plan.peak_bytes > without.peak_bytes) is recorded
    assert plan.phases["measurement"]["held-out pack"] == replace(sizes, needs_target_distribution=False).pack_bytes


def test_the_best_checkpoint_stays_besides() -> None:
    kept, and_best = (
        plan_cost(replace(C, measures=measures), tflops=100.0, total_steps=None, keep=2) for measures in (False, True)
    )
    assert and_best.disk_bytes - kept.disk_bytes == checkpoint_bytes(C)


def test_a_forward_is_about_a_third_of_a_step() -> None:
    for sizes in SIZES.values():
        assert forward_flop(sizes) == forward_flop(replace(sizes, packs_per_step=4))
        assert 0.28 < forward_flop(sizes) / sum(step_flop(sizes).values()) < 0.5


def test_a_plan_prices_what_is_here_and_knows_the_longest_answer(heldout: Path, tmp_path: Path) -> None:
    plan = plan_run(spec_of(heldout), TARGET, H200)
    assert plan.heldout is not None and plan.heldout.measurements == 4 and plan.sizes.measures
    longest = max(len(json.loads(line)["input_ids"]) for line in heldout.read_text().splitlines())
    assert plan.sizes.least_pack_tokens == longest
    absent = plan_run(spec_of(tmp_path / "none.jsonl"), TARGET, H200)
    assert absent.heldout is None and absent.sizes.measures and "measurement" in absent.memory.phases


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no prompts"),
        ("{", ":1 is no held-out answer"),
        ("[]", ":1 is no held-out answer"),
        (row(1, 3, loss_mask=[0, 1, "x", 1]), ":1 is no held-out answer: loss_mask.2"),
        (row(1, 3, loss_mask=[0, 0, 0, 0]), "loss_mask must be 0 on a prompt and 1 on the one answer after it"),
        (row(1, 3, loss_mask=[0, 1, 0, 1]), "loss_mask must be 0 on a prompt and 1 on the one answer after it"),
        (row(1, 3, loss_mask=[1, 1, 1, 0]), "loss_mask must be 0 on a prompt and 1 on the one answer after it"),
        (row(1, 3, loss_mask=[0, 1, 1]), "loss_mask must be 0 on a prompt and 1 on the one answer after it"),
        (row(1, 3) + "\n" + row(3, 1, source="code"), "no answer of source 'code'"),
        (row(1000, 200), "has 1200 tokens, a pack has data.pack_tokens = 1024"),
        ("\udcff", "cannot be read"),
    ],
)
def test_a_file_that_a_run_would_refuse(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "heldout.jsonl"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(SlipstreamError) as refused:
        read_answers(spec_of(path))
    assert refused.value.reason is Reason.DATA_INVALID and says in refused.value.message
    with pytest.raises(SlipstreamError) as refused_by_run:
        load_rows(path, target_fingerprint="f", pack_tokens=1024)
    assert refused_by_run.value.message == refused.value.message


@pytest.mark.parametrize("name", ["answers.jsonl", "a" * 300])
def test_a_file_that_is_not_here_may_be_the_trainers(tmp_path: Path, name: str) -> None:
    assert read_answers(spec_of(tmp_path / name)) is None


def test_answers_of_two_targets_are_no_run_s(tmp_path: Path) -> None:
    path = tmp_path / "heldout.jsonl"
    path.write_text(row(1, 3) + "\n" + row(1, 3, target_fingerprint="g"))
    with pytest.raises(SlipstreamError, match="are of 2 targets") as refused:
        read_answers(spec_of(path))
    assert refused.value.reason is Reason.TARGET_FINGERPRINT_MISMATCH
