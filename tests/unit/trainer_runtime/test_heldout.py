"""Held-out acceptance is what decoding counts, exactly; measuring changes nothing that training depends on."""

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.drafter import DFlashDrafter
from drafter_trainer.drafter_config import resolve_drafter_config
from drafter_trainer.evaluation.compare import Tally
from drafter_trainer.evaluation.decode import BlockDrafter, CachedTarget, Decoded, decode_greedily
from drafter_trainer.frozen_weights import FrozenWeights
from drafter_trainer.heldout import HeldoutEvaluation
from drafter_trainer.heldout_packs import HeldoutPack, find_answers
from drafter_trainer.heldout_walk import Round, acceptance_of, walk
from drafter_trainer.step import TrainingStep
from drafter_trainer.training_packs import StepBatch, TrainingPack
from slipstream.errors import SlipstreamError
from slipstream.heldout_rows import HeldoutRow, HeldoutRows
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import (
    DataSpec,
    DrafterSpec,
    EvalSpec,
    LossSpec,
    OptimizerSpec,
    RunSpec,
    TargetSpec,
    TrainSpec,
)
from slipstream.target_facts import read_frozen_weights, read_target_facts
from slipstream.target_loading import LoadedTarget, decoder_layers, load_causal_lm
from slipstream.wire.data_report import ReportBuilder
from tests.fakes.tiny_models import save_tiny_model
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer

TOKENS, ANCHORS, LAYERS, LIMIT = 128, 12, (1, 3), 30
NOTHING_DROPPED = ReportBuilder().build("heldout").model_dump_json()


class Scene(NamedTuple):
    """A target, its greedy answers, and their hidden states in packs."""

    target: LoadedTarget
    rows: HeldoutRows
    ends: frozenset[int]
    packs: list[HeldoutPack]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    directory: Path = tmp_path_factory.mktemp("target")
    tokenizer = build_tiny_tokenizer(directory, style="chatml")
    save_tiny_model(directory, "llama", vocab_size=len(tokenizer), seed=3)
    target = load_causal_lm(TargetSpec(model=str(directory), dtype="float32"), "cpu")
    prompts = [tuple(range(5 + n, 12 + 2 * n)) for n in range(6)]
    plain = {prompt: decode(target, prompt, None, frozenset()) for prompt in prompts}
    # A token in the middle of one answer ends answers: that one is short, others may be; one is a single token.
    ends = frozenset({plain[prompts[1]].tokens[13], plain[prompts[4]].tokens[0]})
    rows = []
    for number, prompt in enumerate(prompts):
        answer = decode(target, prompt, None, ends).tokens
        rows.append(HeldoutRow("code" if number % 2 else "text", (*prompt, *answer), len(prompt)))
    lengths = {row.num_drafted + 1 for row in rows}
    assert {1, LIMIT} <= lengths and any(1 < length < LIMIT for length in lengths)
    found = HeldoutRows(tuple(rows), "digest")
    documents = [row for row in rows if row.num_drafted]
    packs = [pack_of(target, documents[start : start + 2]) for start in range(0, len(documents), 2)]
    return Scene(target, found, ends, list(find_answers(packs, found, NOTHING_DROPPED)))


def decode(target: LoadedTarget, prompt: Sequence[int], drafter: DFlashDrafter | None, ends: frozenset[int]) -> Decoded:
    cached = CachedTarget(target.model, decoder_layers(target.model), LAYERS if drafter else ())
    embedding, head = target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight
    block = None if drafter is None else BlockDrafter(drafter, embedding, head)
    try:
        return decode_greedily(cached, block, torch.tensor(prompt), LIMIT, ends)
    finally:
        cached.close()


@torch.no_grad()
def pack_of(target: LoadedTarget, rows: Sequence[HeldoutRow]) -> dict[str, Tensor]:
    """Documents one behind the other, then padding; hidden states as the target computes them in one pass each."""
    pack = {
        "input_ids": torch.zeros(TOKENS, dtype=torch.int32),
        "loss_mask": torch.zeros(TOKENS, dtype=torch.uint8),
        "document_ids": torch.full((TOKENS,), -1, dtype=torch.int32),
        "position_ids": torch.zeros(TOKENS, dtype=torch.int32),
        **{f"hidden_states.{layer}": torch.zeros(TOKENS, target.model.config.hidden_size) for layer in LAYERS},
    }
    begin = 0
    for number, row in enumerate(rows):
        ids = torch.tensor(row.token_ids)
        part = slice(begin, begin + len(ids))
        cached = CachedTarget(target.model, decoder_layers(target.model), LAYERS)
        _, features = cached.forward(ids)
        cached.close()
        assert features is not None
        for layer, states in zip(LAYERS, features.chunk(len(LAYERS), dim=-1), strict=True):
            pack[f"hidden_states.{layer}"][part] = states
        pack["input_ids"][part], pack["document_ids"][part] = ids.int(), number
        pack["position_ids"][part] = torch.arange(len(ids), dtype=torch.int32)
        pack["loss_mask"][begin + row.answer_start : part.stop] = 1
        begin = part.stop
    return pack


def trained_step(scene: Scene, **changes: Any) -> TrainingStep:
    """A drafter that has learned these very answers for a while, so that blocks are accepted."""
    spec = RunSpec(
        name="tiny",
        target=TargetSpec(model="m", dtype="float32"),
        data=DataSpec(files=("d",), pack_tokens=TOKENS),
        drafter=DrafterSpec(
            num_layers=2, target_layer_ids=LAYERS, mask_token_id=0, **changes.get("drafter", {"block_size": 4})
        ),
        train=TrainSpec(device="cpu", attention="sdpa", precision="float32", anchors_per_pack=ANCHORS, max_steps=9),
        optimizer=OptimizerSpec(learning_rate=5e-3, ema_decay=changes.get("ema_decay")),
        eval=EvalSpec(heldout="answers.jsonl"),
    )
    facts = read_target_facts(scene.target.model, scene.target.tokenizer).config
    weights = read_frozen_weights(scene.target.model, facts)
    embedding = weights["embed_tokens.weight"]
    frozen = FrozenWeights(
        embedding, weights.get("lm_head.weight", embedding), weights["norm.weight"], facts.embedding_scale
    )
    step = TrainingStep(resolve_drafter_config(spec.drafter, facts), frozen, spec)
    step.load_weights(step.first_weights(seed=0))
    for number in range(40):
        tensors = scene.packs[number % len(scene.packs)].tensors
        anchors = draw_anchors(tensors["loss_mask"], tensors["document_ids"], ANCHORS, 0, number)
        step.run(StepBatch(number, (TrainingPack(number, tensors, anchors),)), 5e-3).wait()
    return step


@pytest.fixture(scope="module")
def trained(scene: Scene) -> TrainingStep:
    """With blocks of four, for tests that only look."""
    return trained_step(scene)


def evaluation_of(scene: Scene, block_size: int, stop: threading.Event | None = None) -> HeldoutEvaluation:
    stop = stop or threading.Event()
    return HeldoutEvaluation(scene.packs, "digest", num_anchors=ANCHORS, block_size=block_size, stop=stop)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"drafter": {"block_size": 2}}, id="blocks of two"),
        pytest.param({"drafter": {"block_size": 6}}, id="blocks of six"),
        pytest.param(
            {
                "drafter": {
                    "block_size": 4,
                    "layer_types": ("full_attention", "sliding_attention"),
                    "sliding_window": 8,
                },
            },
            id="a sliding layer",
        ),
        pytest.param({"ema_decay": 0.9}, id="the moving average is deployed"),
    ],
)
def test_the_estimate_is_what_decoding_counts(scene: Scene, changes: dict[str, object]) -> None:
    step = trained_step(scene, **changes)
    config = step.drafter.config
    measured = evaluation_of(scene, config.block_size).measure(step)

    drafter = DFlashDrafter(config).eval()
    drafter.load_state_dict(step.optimizer.deployed_weights())
    tallies: dict[str, Tally] = defaultdict(Tally)
    for row in scene.rows.rows:
        decoded = decode(scene.target, row.token_ids[: row.answer_start], drafter, scene.ends)
        assert tuple(decoded.tokens) == row.token_ids[row.answer_start :]
        tallies[row.source].add(decoded)
    assert measured is not None
    for source, tally in tallies.items():
        found = measured.by_source[source]
        assert (found.rounds, found.tokens) == (tally.rounds, tally.tokens)
        assert found.accepted_length == pytest.approx(tally.accepted_length, rel=1e-12)
    assert measured.overall.accepted_length > 1.05, "nothing was accepted, so that nothing was shown"
    assert measured.estimate().by_source.keys() == {"code", "text"}
    assert len(measured.overall.slot_acceptance) == config.block_size - 1
    assert 0 < measured.overall.slot_acceptance[0] < 1


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_measuring_changes_nothing(scene: Scene, trained: TrainingStep, ema_decay: float | None) -> None:
    step = trained if ema_decay is None else trained_step(scene, ema_decay=ema_decay)

    def state() -> Mapping[str, Tensor]:
        deployed = {f"deployed.{name}": tensor for name, tensor in step.optimizer.deployed_weights().items()}
        module = {f"module.{name}": tensor for name, tensor in step.drafter.state_dict().items()}
        return {**deployed, **module, **step.optimizer.state_tensors(), "rng": torch.get_rng_state()}

    before = {name: tensor.clone() for name, tensor in state().items()}
    first, second = (evaluation_of(scene, 4).measure(step) for _ in range(2))
    assert first is not None and second is not None and first.by_source == second.by_source
    after = state()
    assert before.keys() == after.keys()
    assert not [name for name in before if not torch.equal(before[name], after[name])]


def test_a_run_that_is_told_to_stop_measures_nothing(scene: Scene, trained: TrainingStep) -> None:
    stop = threading.Event()
    stop.set()
    assert evaluation_of(scene, 4, stop).measure(trained) is None


def test_an_objective_on_the_targets_distribution_is_measured_without_it(scene: Scene, trained: TrainingStep) -> None:
    step = trained
    other = TrainingStep(
        step.drafter.config,
        step.frozen,
        RunSpec(
            name="tiny",
            target=TargetSpec(model="m", dtype="float32"),
            data=DataSpec(files=("d",), pack_tokens=TOKENS),
            train=TrainSpec(device="cpu", attention="sdpa", precision="float32", anchors_per_pack=ANCHORS, max_steps=9),
            loss=LossSpec(objective="kl"),
            eval=EvalSpec(heldout="answers.jsonl"),
        ),
    )
    other.load_weights(step.optimizer.deployed_weights())
    ours, theirs = (evaluation_of(scene, 4).measure(one) for one in (step, other))
    assert ours is not None and theirs is not None and ours.by_source == theirs.by_source


def test_a_walk_follows_what_was_accepted() -> None:
    # Blocks start behind tokens 0, 2, 3 and 7, and nothing else counts.
    matched = [1, 3, 0, 3, 0, 0, 0, 2, 1]
    assert walk(matched, 4) == [Round(2, 1, 3), Round(1, 0, 3), Round(4, 3, 3), Round(2, 2, 2)]
    assert walk([], 4) == []
    # The whole rest is drafted right: the target's own token would lie behind the end.
    assert walk([2, 1], 4) == [Round(2, 2, 2)]
    found = acceptance_of([walk(matched, 4), walk([0], 4)], 4)
    assert (found.answers, found.rounds, found.tokens, found.accepted_length) == (2, 5, 10, 2.0)
    # Slot 3 lies inside the answer in three rounds only, of which one kept it.
    assert found.slot_acceptance == (3 / 5, 2 / 4, 1 / 3)


def test_documents_are_known_by_their_tokens(scene: Scene) -> None:
    packs = [pack.tensors for pack in scene.packs]
    with pytest.raises(SlipstreamError, match="in no pack") as missing:
        list(find_answers(packs[1:], scene.rows, NOTHING_DROPPED))
    assert missing.value.reason is Reason.DATA_INVALID
    fewer = HeldoutRows(scene.rows.rows[1:], "digest")
    with pytest.raises(SlipstreamError, match="not those in this trainer's file"):
        list(find_answers(packs, fewer, NOTHING_DROPPED))
    twice = HeldoutRows((*scene.rows.rows, *scene.rows.rows), "digest")
    assert len(list(find_answers([*packs, *packs], twice, NOTHING_DROPPED))) == 2 * len(packs)
