"""Sizes, layers and the mask row, resolved from recipe and target; what does not fit is refused in words."""

import logging

import pytest

from drafter_trainer.drafter_config import (
    DrafterConfig,
    resolve_drafter_config,
    resolve_mask_token_id,
)
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DrafterSpec
from slipstream.run_spec.target_layers import default_target_layer_ids
from slipstream.wire.target_config import TargetConfig


def target(**changes: object) -> TargetConfig:
    values: dict[str, object] = {
        "model_type": "llama",
        "num_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "embedding_scale": 1.0,
        "logit_soft_cap": None,
        "norm_weight_offset": 0.0,
        "tokenizer_length": 49152,
        "mask_token_id": None,
        "special_tokens": {"<jupyter_text>": 12, "<file_sep>": 4},
    }
    return TargetConfig.model_validate(values | changes)


@pytest.mark.parametrize(
    ("num_layers", "features", "expected"),
    [(36, 5, (1, 9, 17, 25, 33)), (30, 5, (1, 8, 14, 20, 27)), (30, 1, (15,)), (30, 2, (1, 27)), (5, 2, (1, 2))],
)
def test_default_layers(num_layers: int, features: int, expected: tuple[int, ...]) -> None:
    assert default_target_layer_ids(num_layers, features) == expected


@pytest.mark.parametrize(("num_layers", "features"), [(4, 2), (2, 2), (6, 5)])
def test_too_shallow_a_target_is_refused(num_layers: int, features: int) -> None:
    with pytest.raises(SlipstreamError, match=f"{features} different features .* {num_layers} layers") as caught:
        default_target_layer_ids(num_layers, features)
    assert caught.value.reason is Reason.TARGET_INCOMPATIBLE


def test_sizes_left_out_are_the_targets() -> None:
    config = resolve_drafter_config(DrafterSpec(num_layers=2, block_size=8, mask_token="<file_sep>"), target())
    assert config.target_layer_ids == (1, 27)
    assert config.feature_names == ("hidden_states.1", "hidden_states.27")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert config.layer_types == ("full_attention",) * 2
    assert DrafterConfig.from_json(config.to_json()) == config


def test_given_sizes_win_and_layers_are_sorted() -> None:
    spec = DrafterSpec(
        num_layers=2,
        target_layer_ids=(20, 3, 11),
        mask_token_id=7,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=100,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=64,
    )
    config = resolve_drafter_config(spec, target())
    assert config.target_layer_ids == (3, 11, 20) and config.num_features == 3
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 2, 32)
    assert (config.intermediate_size, config.mask_token_id, config.sliding_window) == (100, 7, 64)


def test_a_layer_the_target_lacks_is_refused() -> None:
    with pytest.raises(SlipstreamError, match=r"layer 30, .* layers 0 to 29") as caught:
        resolve_drafter_config(DrafterSpec(target_layer_ids=(3, 30), mask_token_id=1), target())
    assert caught.value.reason is Reason.TARGET_INCOMPATIBLE


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [({"num_attention_heads": 8}, {}, "8 attention heads .* 3"), ({}, {"head_dim": 63}, "head_dim is 63")],
)
def test_heads_that_do_not_fit_are_refused(spec: dict, changes: dict, message: str) -> None:
    with pytest.raises(SlipstreamError, match=message) as caught:
        resolve_drafter_config(DrafterSpec(mask_token_id=1, **spec), target(**changes))
    assert caught.value.reason is Reason.SPEC_INVALID


@pytest.mark.parametrize(
    ("spec", "changes", "expected"),
    [
        ({"mask_token_id": 9}, {"mask_token_id": 3, "tokenizer_length": 49000}, 9),
        ({}, {"mask_token_id": 3, "tokenizer_length": 49000}, 3),
        ({"mask_token": "<file_sep>"}, {"tokenizer_length": 49000}, 49000),
        ({"mask_token": "<file_sep>"}, {}, 4),
    ],
)
def test_order_of_the_mask_row(spec: dict, changes: dict, expected: int) -> None:
    assert resolve_mask_token_id(DrafterSpec(**spec), target(**changes)) == expected


def test_a_named_mask_that_is_passed_over_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve_mask_token_id(DrafterSpec(mask_token="<file_sep>"), target(tokenizer_length=49000))
    assert "<file_sep>" in caplog.text and "49000" in caplog.text


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "no mask token and no unused row"),
        ({"mask_token": "<nope>"}, "'<nope>', which is no special token"),
        ({"mask_token_id": 49152}, "row 49152, .* 49152 rows"),
    ],
)
def test_a_mask_that_cannot_be_is_refused(spec: dict, message: str) -> None:
    with pytest.raises(SlipstreamError, match=message) as caught:
        resolve_mask_token_id(DrafterSpec(**spec), target())
    assert caught.value.reason is Reason.SPEC_INVALID


@pytest.mark.parametrize("text", ["{", "[]", '{"block_size": 8}'])
def test_a_broken_configuration_file_is_refused(text: str) -> None:
    with pytest.raises(SlipstreamError, match="configuration") as caught:
        DrafterConfig.from_json(text)
    assert caught.value.reason is Reason.CHECKPOINT_INVALID
