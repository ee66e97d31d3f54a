"""Gemma 2 scales embeddings and caps logits: what a drafter reads, its loss and its drafts, against transformers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drafter_trainer.anchors import draw_anchors
from drafter_trainer.drafter_config import resolve_drafter_config
from drafter_trainer.evaluation.static_drafter import StaticDrafter
from drafter_trainer.formats.module import as_module
from drafter_trainer.frozen_weights import FrozenWeights
from drafter_trainer.step import TrainingStep
from drafter_trainer.training_packs import StepBatch, TrainingPack
from slipstream.run_spec.spec import DataSpec, DrafterSpec, LossSpec, RunSpec, TargetSpec, TrainSpec
from slipstream.target_facts import read_frozen_weights, read_target_facts
from slipstream.target_loading import LoadedTarget, decoder_layers
from tests.unit.target_model.document_alone import VOCAB_SIZE, load_tiny_target, save_tiny_target

TOKENS, USED, LAYERS = 128, 90, (1, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    directory: Path = tmp_path_factory.mktemp("gemma2")
    # Logits twice as large as the cap: without it every probability would be another one.
    return load_tiny_target(save_tiny_target(directory, "gemma2", final_logit_softcapping=1.5))


def make_step(target: LoadedTarget, objective: str) -> TrainingStep:
    facts = read_target_facts(target.model, target.tokenizer).config
    spec = RunSpec(
        name="tiny",
        target=TargetSpec(model="m", dtype="float32"),
        data=DataSpec(files=("d",), pack_tokens=TOKENS),
        drafter=DrafterSpec(num_layers=1, target_layer_ids=LAYERS, block_size=4, mask_token_id=0),
        train=TrainSpec(device="cpu", attention="sdpa", precision="float32", anchors_per_pack=16, max_steps=9),
        loss=LossSpec(objective=objective, slot_weights="uniform"),
    )
    weights = read_frozen_weights(target.model, facts)
    table = weights["embed_tokens.weight"]
    frozen = FrozenWeights(table, table, weights["norm.weight"].float(), facts.embedding_scale)
    step = TrainingStep(resolve_drafter_config(spec.drafter, facts), frozen, spec)
    # Large enough that what is drafted depends on what is read, and that its logits need the cap too.
    first = {name: weight * 15 if weight.dim() == 2 else weight for name, weight in step.first_weights(0).items()}
    step.load_weights(first | {"norm.weight": 2 * first["norm.weight"]})
    return step


@torch.inference_mode()
def read_plainly(target: LoadedTarget, tokens: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Payload of one document, what enters the first layer [L, D] and the logits [L, V], by transformers alone."""
    seen: dict[str, Tensor] = {}
    layers = decoder_layers(target.model)

    def keep(name: str):  # type: ignore[no-untyped-def]
        return lambda _module, _given, output: seen.update({name: output[0] if output.dim() == 3 else output})

    hooks = [layers[layer].register_forward_hook(keep(f"hidden_states.{layer}")) for layer in LAYERS]
    hooks.append(layers[0].register_forward_pre_hook(lambda _module, given: seen.update(embedded=given[0][0])))
    logits = target.model(tokens[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    embedded = seen.pop("embedded")
    return seen | {"last_hidden_state": seen["hidden_states.3"]}, embedded, logits


def make_pack(target: LoadedTarget) -> tuple[TrainingPack, Tensor]:
    """One document with padding behind, and the target's logits [L, V] on it."""
    tokens = torch.randint(1, VOCAB_SIZE, (USED,), generator=torch.Generator().manual_seed(3))
    states, _, logits = read_plainly(target, tokens)
    room = TOKENS - USED
    rows = {
        "input_ids": functional.pad(tokens.int(), (0, room)),
        "loss_mask": (torch.arange(TOKENS) < USED).to(torch.uint8),
        "document_ids": torch.where(torch.arange(TOKENS) < USED, 0, -1).int(),
        "position_ids": torch.where(torch.arange(TOKENS) < USED, torch.arange(TOKENS), 0).int(),
    }
    anchors = draw_anchors(rows["loss_mask"], rows["document_ids"], 16, 0, 0)
    return TrainingPack(
        0, rows | {name: functional.pad(s, (0, 0, 0, room)) for name, s in states.items()}, anchors
    ), logits


@pytest.mark.parametrize("objective", ["cross_entropy", "kl", "tv"])
def test_the_loss_is_that_of_capped_logits(target: LoadedTarget, objective: str) -> None:
    step = make_step(target, objective)
    pack, target_logits = make_pack(target)
    blocks = step.block_targets(pack)
    head = target.model.get_output_embeddings().weight
    with torch.no_grad():
        hidden = step.hidden_states(pack, blocks).unflatten(0, blocks.labels.shape)
    uncapped = hidden[:, 1:].double() @ head.double().t()
    assert uncapped.abs().max() > 3, "the cap matters"
    drafted = (1.5 * torch.tanh(uncapped / 1.5)).log_softmax(-1)
    rows = (pack.anchors.positions[:, None] + torch.arange(3)).clamp(max=USED - 1)
    wanted = target_logits.double()[rows].log_softmax(-1)
    if objective == "cross_entropy":
        cost = -drafted.gather(-1, blocks.labels[:, 1:, None])[..., 0]
    elif objective == "kl":
        cost = (wanted.exp() * (wanted - drafted)).sum(-1)
    else:
        cost = 0.5 * (wanted.exp() - drafted.exp()).abs().sum(-1)
    plain = cost[blocks.counted[:, 1:]].mean().item()
    assert step.run(StepBatch(0, (pack,)), 0.0).wait().acceptance.loss == pytest.approx(plain, rel=1e-5)


def test_blocks_are_embedded_as_the_target_embeds_tokens(target: LoadedTarget) -> None:
    step = make_step(target, "cross_entropy")
    tokens = torch.arange(5, 25)
    _, embedded, _ = read_plainly(target, tokens)
    assert step.frozen.embedding_scale == pytest.approx(8.0)
    assert torch.equal(step.frozen.embed(tokens), embedded)


def test_drafts_come_from_capped_logits_and_scaled_embeddings(target: LoadedTarget) -> None:
    """Decoding proposes what training's forward says, through the same cap."""
    step = make_step(target, "cross_entropy")
    pack, _ = make_pack(target)
    blocks = step.block_targets(pack)
    head = target.model.get_output_embeddings().weight
    embedding = target.model.get_input_embeddings().weight
    with torch.no_grad():
        hidden = step.hidden_states(pack, blocks).unflatten(0, blocks.labels.shape)
        trained = 1.5 * torch.tanh(hidden[:, 1:] @ head.t() / 1.5)
        static = StaticDrafter(as_module(step.drafter.config, step.optimizer.weights()).eval(), embedding, head, TOKENS)
        static.extend(step.features(pack)[None, :USED], torch.arange(USED)[None])
        anchor = int(pack.anchors.positions[7])
        proposed = static.propose(
            pack.tensors["input_ids"][anchor][None].long(), torch.arange(anchor, anchor + 4)[None]
        )
    torch.testing.assert_close(proposed[0], trained[7], rtol=1e-4, atol=1e-4)
