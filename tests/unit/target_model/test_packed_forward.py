"""Hidden states of packed documents equal those of each document alone, as transformers computes them."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_loading import decoder_layers
from target_server.forward import PackedForward
from target_server.target_model import TargetModel
from tests.fakes.tiny_models import FAMILIES, Family
from tests.unit.target_model.document_alone import (
    VOCAB_SIZE,
    layer_outputs,
    load_reference,
    load_tiny_target,
    save_tiny_target,
)

# Longer and shorter than the sliding window of 8, exactly it, and single tokens first, in the middle and last.
LENGTHS = (1, 23, 8, 1, 40, 9, 1)


def random_tokens(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, rows).astype(np.int32)


def by_layer(captured: dict[str, Tensor], num_layers: int) -> list[Tensor]:
    return [captured[f"hidden_states.{layer}"] for layer in range(num_layers)]


def alone(model: PreTrainedModel, token_ids: np.ndarray, lengths: Sequence[int]) -> list[Tensor]:
    """Every layer's output for the documents one by one, concatenated: `[used, D]` each."""
    documents = [layer_outputs(model, token_ids[start:end]) for start, end in pairwise((0, *accumulate(lengths)))]
    return [torch.cat(layer) for layer in zip(*documents, strict=True)]


def largest_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_equals_transformers_on_each_document_alone(family: Family, tmp_path: Path) -> None:
    save_tiny_target(tmp_path, family)
    forward = PackedForward(load_tiny_target(tmp_path).model)
    tokens = random_tokens(sum(LENGTHS) + 13)

    captured = forward.capture(tokens, LENGTHS, range(forward.num_layers), last_hidden_state=True)

    expected = alone(load_reference(tmp_path), tokens, LENGTHS)
    assert len(expected) == forward.num_layers == 4
    for ours, theirs in zip(by_layer(captured, forward.num_layers), expected, strict=True):
        assert ours.shape == (len(tokens), 64)
        assert ours.dtype == torch.float32
        assert largest_error(ours[: sum(LENGTHS)], theirs) < 1e-5
        assert not ours[sum(LENGTHS) :].any()
    assert torch.equal(captured["last_hidden_state"], captured["hidden_states.3"])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bfloat16_is_as_near_as_its_rounding(family: Family, tmp_path: Path) -> None:
    save_tiny_target(tmp_path, family)
    forward = PackedForward(load_tiny_target(tmp_path, "bfloat16").model)
    tokens = random_tokens(sum(LENGTHS))

    captured = forward.capture(tokens, LENGTHS, range(4), last_hidden_state=False)

    for ours, theirs in zip(by_layer(captured, 4), alone(load_reference(tmp_path), tokens, LENGTHS), strict=True):
        assert ours.dtype == torch.bfloat16
        assert largest_error(ours, theirs) < 0.03


@pytest.fixture
def llama(tmp_path: Path) -> PackedForward:
    return PackedForward(load_tiny_target(save_tiny_target(tmp_path)).model)


def test_a_document_does_not_depend_on_its_neighbours(llama: PackedForward) -> None:
    tokens, changed = random_tokens(40), random_tokens(40)
    changed[:10], changed[30:] = 7, 9

    before = llama.capture(tokens, (10, 20, 10), (3,), last_hidden_state=False)["hidden_states.3"]
    after = llama.capture(changed, (10, 20, 10), (3,), last_hidden_state=False)["hidden_states.3"]

    assert torch.equal(before[10:30], after[10:30])
    assert not torch.equal(before[:10], after[:10])


def test_what_follows_the_last_document_is_not_read(llama: PackedForward) -> None:
    tokens, padded = random_tokens(20), random_tokens(20)
    padded[12:] = -1  # no token at all: reading it would fail

    first = llama.capture(tokens, (5, 7), (0, 2), last_hidden_state=True)
    second = llama.capture(padded, (5, 7), (0, 2), last_hidden_state=True)

    assert first.keys() == second.keys() == {"hidden_states.0", "hidden_states.2", "last_hidden_state"}
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_full_pack_and_a_long_document(llama: PackedForward, tmp_path: Path) -> None:
    tokens = random_tokens(512)

    captured = llama.capture(tokens, (512,), (3,), last_hidden_state=False)["hidden_states.3"]

    assert largest_error(captured, layer_outputs(load_reference(tmp_path), tokens)[3]) < 1e-5


def test_layers_after_the_last_one_asked_for_do_not_run(tmp_path: Path) -> None:
    model = load_tiny_target(save_tiny_target(tmp_path)).model
    forward, ran = PackedForward(model), []
    for index, layer in enumerate(decoder_layers(model)):
        layer.register_forward_pre_hook(lambda *_arguments, index=index: ran.append(index))

    forward.capture(random_tokens(10), (10,), (1, 0), last_hidden_state=False)
    assert ran == [0, 1]
    ran.clear()
    forward.capture(random_tokens(10), (10,), (0,), last_hidden_state=True)
    assert ran == [0, 1, 2, 3]


def test_logits_are_never_computed_and_no_hooks_stay(tmp_path: Path) -> None:
    loaded = load_tiny_target(save_tiny_target(tmp_path)).model
    forward = PackedForward(loaded)

    def refuse(*_arguments: object) -> None:
        raise AssertionError("the head or the final norm ran")

    loaded.lm_head.register_forward_hook(refuse)
    loaded.model.norm.register_forward_hook(refuse)
    forward.capture(random_tokens(10), (10,), range(4), last_hidden_state=True)

    assert not any(layer._forward_hooks for layer in decoder_layers(loaded))


def test_gradients_are_off_and_memory_is_not_shared_between_packs(llama: PackedForward) -> None:
    first = llama.capture(random_tokens(10), (10,), (2,), last_hidden_state=False)["hidden_states.2"]
    copy = first.clone()
    llama.capture(random_tokens(10, seed=1), (10,), (2,), last_hidden_state=False)

    assert not first.requires_grad
    assert torch.equal(first, copy)


def test_layers_that_mix_tokens_without_attention_are_refused(tmp_path: Path) -> None:
    model = load_tiny_target(save_tiny_target(tmp_path)).model

    class Recurrent(nn.Module):
        def forward(self, hidden_states: Tensor, **_arguments: object) -> tuple[Tensor, None]:
            return hidden_states.cumsum(dim=1), None

    model.model.layers[2].self_attn = Recurrent()
    with pytest.raises(SlipstreamError, match=r"Layer 2 \(LlamaDecoderLayer\).*attention interface") as caught:
        PackedForward(model)
    assert caught.value.reason is Reason.MODEL_INVALID


def test_attention_sinks_are_refused(tmp_path: Path) -> None:
    model = load_tiny_target(save_tiny_target(tmp_path)).model
    attention = model.model.layers[1].self_attn
    original = attention.forward
    attention.forward = lambda **arguments: original(**arguments, s_aux=torch.zeros(4))

    with pytest.raises(SlipstreamError, match="LlamaAttention cannot run on packed documents: it uses s_aux"):
        PackedForward(model)


def test_target_model_refuses_layers_and_documents_that_it_cannot_serve(tmp_path: Path) -> None:
    save_tiny_target(tmp_path, max_position_embeddings=32)
    target = TargetModel.load(TargetSpec(model=str(tmp_path), dtype="float32"), device="cpu")

    with pytest.raises(SlipstreamError, match=r"Layers \[4\] .* has layers 0 to 3") as caught:
        target.capture(random_tokens(10), (10,), (0, 4), False)
    assert caught.value.reason is Reason.TARGET_INCOMPATIBLE
    with pytest.raises(SlipstreamError, match="33 tokens, but the target is only right up to 32") as caught:
        target.capture(random_tokens(40), (33,), (0,), False)
    assert caught.value.reason is Reason.DATA_INVALID
    assert target.capture(random_tokens(40), (32, 8), (0,), False)["hidden_states.0"].shape == (40, 64)
