"""Facts and frozen weights reproduce the model; models that cannot be reproduced are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.target_facts import read_frozen_weights, read_target_facts
from slipstream.target_loading import LoadedTarget
from slipstream.wire.target_config import TargetConfig, frozen_weight_names
from tests.fakes.tiny_models import FAMILIES, Family
from tests.unit.target_model.document_alone import VOCAB_SIZE, layer_outputs, load_tiny_target, save_tiny_target


def load(directory: Path, family: Family = "llama", **model: Any) -> LoadedTarget:
    return load_tiny_target(save_tiny_target(directory, family, **model))


def logits_from_frozen_weights(last_output: Tensor, config: TargetConfig, weights: dict[str, Tensor]) -> Tensor:
    """What a drafter's owner computes from the last hidden state `[L, D]`: `[L, V]`."""
    unit = last_output * torch.rsqrt(last_output.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
    head = weights["embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    logits = (unit * weights["norm.weight"]) @ head.T
    cap = config.logit_soft_cap
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_weights_give_the_logits_and_the_embeddings_of_the_model(family: Family, tmp_path: Path) -> None:
    loaded = load(tmp_path, family)
    config = read_target_facts(loaded.model, loaded.tokenizer).config
    weights = read_frozen_weights(loaded.model, config)
    tokens = torch.arange(5, 25)

    assert set(weights) == set(frozen_weight_names(config.tie_word_embeddings))
    assert config.tie_word_embeddings == family.startswith("gemma")
    with torch.inference_mode():
        theirs = loaded.model(tokens[None]).logits[0]
        ours = logits_from_frozen_weights(layer_outputs(loaded.model, tokens.numpy())[-1], config, weights)
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)

    first_inputs: list[Tensor] = []
    loaded.model.model.layers[0].register_forward_pre_hook(
        lambda _module, arguments: first_inputs.append(arguments[0]),
    )
    with torch.inference_mode():
        loaded.model(tokens[None])
    assert torch.equal(first_inputs[0][0], weights["embed_tokens.weight"][tokens] * config.embedding_scale)


def test_the_config_of_a_llama(tmp_path: Path) -> None:
    loaded = load(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 54321.0})
    facts = read_target_facts(loaded.model, loaded.tokenizer)

    assert facts.max_document_tokens == 4096
    tokenizer = loaded.tokenizer
    assert facts.config == TargetConfig(
        model_type="llama",
        num_layers=4,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
        rms_norm_eps=1e-6,
        rope_theta=54321.0,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        embedding_scale=1.0,
        logit_soft_cap=None,
        norm_weight_offset=0.0,
        tokenizer_length=len(tokenizer),
        mask_token_id=None,
        special_tokens=tokenizer.get_added_vocab(),
    )
    assert TargetConfig.from_json(facts.config.canonical_json()) == facts.config


def test_gemma_scales_offsets_and_caps(tmp_path: Path) -> None:
    loaded = load(tmp_path, "gemma2", hidden_size=96)
    config = read_target_facts(loaded.model, loaded.tokenizer).config

    assert config.embedding_scale == pytest.approx(96**0.5, rel=1e-6)
    assert config.norm_weight_offset == 1.0
    assert config.logit_soft_cap == 4.0
    norm = read_frozen_weights(loaded.model, config)["norm.weight"]
    assert torch.equal(norm, loaded.model.model.norm.weight + 1.0)


def test_gemma3_reports_the_rotation_of_its_full_layers(tmp_path: Path) -> None:
    loaded = load(tmp_path, "gemma3")
    assert loaded.model.config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0
    assert read_target_facts(loaded.model, loaded.tokenizer).config.rope_theta == 1_000_000.0


def test_a_large_norm_weight_does_not_hide_the_offset(tmp_path: Path) -> None:
    save_tiny_target(tmp_path, "gemma3")
    loaded = load_tiny_target(tmp_path, "bfloat16")
    loaded.model.model.norm.weight.fill_(50.0)  # one more is only 2 %, less than the tolerance in bfloat16
    assert read_target_facts(loaded.model, loaded.tokenizer).config.norm_weight_offset == 1.0


def test_a_rotation_that_depends_on_the_longest_document_bounds_documents(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    loaded = load(tmp_path, rope_parameters=rope, max_position_embeddings=512)
    assert read_target_facts(loaded.model, loaded.tokenizer).max_document_tokens == 128


def change_logits(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda _module, _arguments, output: output * 0.125)


def change_embeddings(model: PreTrainedModel) -> None:
    model.model.embed_tokens.register_forward_hook(lambda _module, _arguments, output: output + 0.1)


def change_norm(model: PreTrainedModel) -> None:
    model.model.norm.register_forward_hook(lambda _module, _arguments, output: output * 3.0)


def add_bias_to_head(model: PreTrainedModel) -> None:
    model.lm_head.bias = nn.Parameter(torch.zeros(VOCAB_SIZE))


def replace_norm(model: PreTrainedModel) -> None:
    model.model.norm = nn.LayerNorm(64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_logits, "changes its logits after the head"),
        (change_embeddings, "is not a multiple of its token embeddings"),
        (change_norm, "not an RMS norm with its weight"),
        (add_bias_to_head, "head of the target is not one matrix"),
        (replace_norm, "does not end in an RMS norm"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    loaded = load(tmp_path)
    change(loaded.model)
    with pytest.raises(SlipstreamError, match=words) as caught:
        read_target_facts(loaded.model, loaded.tokenizer)
    assert caught.value.reason is Reason.MODEL_INVALID


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    loaded.tokenizer.add_tokens([f"<extra {index}>" for index in range(VOCAB_SIZE)])
    with pytest.raises(SlipstreamError, match="vocabulary has only 512 rows"):
        read_target_facts(loaded.model, loaded.tokenizer)
