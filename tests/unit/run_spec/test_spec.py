"""Settings that contradict each other are refused in words; the device is resolved without a silent fallback."""

from typing import Any

import pytest
from pydantic import ValidationError

from slipstream.errors import SlipstreamError
from slipstream.run_spec.device import resolve_device
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import (
    DataSpec,
    DrafterSpec,
    EvalSpec,
    LossSpec,
    OptimizerSpec,
    RunSpec,
    Section,
    StreamSpec,
    TrainSpec,
)


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (DataSpec, {"files": ["a"], "pack_tokens": 256, "max_document_tokens": 257}, "must fit into a pack"),
        (DrafterSpec, {"mask_token_id": 1, "mask_token": "<x>"}, "name the mask once"),
        (DrafterSpec, {"target_layer_ids": []}, "at least one layer"),
        (DrafterSpec, {"target_layer_ids": [1, 1]}, "each once"),
        (DrafterSpec, {"target_layer_ids": [1, 2], "num_features": 3}, "target_layer_ids has 2"),
        (DrafterSpec, {"num_layers": 2, "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        (DrafterSpec, {"num_layers": 1, "layer_types": ["sliding_attention"]}, "sliding_window is not set"),
        (DrafterSpec, {"sliding_window": 64}, "names no sliding_attention"),
        (DrafterSpec, {"num_attention_heads": 9, "num_key_value_heads": 2}, "not a multiple"),
        (LossSpec, {"slot_weights": "dpace", "decay_gamma": 4.0}, "would ignore it"),
        (LossSpec, {"objective": "hinge"}, "'hinge' is no objective; expected one of cross_entropy, kl, "),
        (LossSpec, {"objective": {"tv": 0.5, "hinge": 0.5}}, "'hinge' is no objective"),
        (LossSpec, {"objective": {}}, "expected the name of an objective"),
        (LossSpec, {"objective": 3}, "expected the name of an objective"),
        (LossSpec, {"objective": {"tv": 0.5}}, "a single objective has weight 1"),
        (LossSpec, {"objective": {"tv": 0.5, "kl": 0.0}}, "greater than 0"),
        (LossSpec, {"lk_eta": 2.0}, "would ignore it"),
        (OptimizerSpec, {"muon_learning_rate": 0.02}, "for kind = 'muon'"),
        (OptimizerSpec, {"muon_momentum": 0.9}, "for kind = 'muon'"),
        (OptimizerSpec, {"schedule": "linear", "decay_fraction": 0.2}, "for schedule = 'wsd'"),
        (TrainSpec, {}, "the run never ends"),
        (TrainSpec, {"max_steps": 1, "device": "cpu"}, "flex_attention has no backward"),
        (TrainSpec, {"max_steps": 1, "device": "cuda", "attention": "sdpa"}, "never allowed"),
        (StreamSpec, {"start": "group"}, "needs group and group_size"),
        (StreamSpec, {"start": "group", "group": "sweep"}, "needs group and group_size"),
        (StreamSpec, {"group": "sweep"}, "start = 'group' only"),
        (EvalSpec, {"every_steps": 5}, "heldout is not, so that nothing is measured"),
    ],
)
def test_contradictions_are_refused(section: type[Section], values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        section.model_validate(values)


def test_a_run_has_at_least_one_step() -> None:
    with pytest.raises(ValidationError, match="less than one step"):
        RunSpec.model_validate(
            {
                "name": "x",
                "target": {"model": "m"},
                "data": {"files": ["a"], "pack_tokens": 256},
                "train": {"max_tokens": 511, "packs_per_step": 2},
            }
        )


@pytest.mark.parametrize(
    ("device", "attention", "cuda_available", "expected"),
    [
        ("auto", "flex", True, "cuda"),
        ("cuda", "flex", True, "cuda"),
        ("auto", "sdpa", False, "cpu"),
        ("cpu", "sdpa", False, "cpu"),
        ("cpu", "sdpa", True, "cpu"),
    ],
)
def test_resolved_device(device: Any, attention: Any, cuda_available: bool, expected: str) -> None:
    spec = TrainSpec(device=device, attention=attention, max_steps=1)
    assert resolve_device(spec, cuda_available) == expected


@pytest.mark.parametrize(
    ("device", "attention", "cuda_available", "remedy"),
    [
        ("auto", "flex", False, "train.attention=sdpa"),
        ("cuda", "flex", False, "train.device=cpu"),
        ("auto", "sdpa", True, "train.attention=flex"),
    ],
)
def test_attention_that_cannot_train_there_is_refused(
    device: Any, attention: Any, cuda_available: bool, remedy: str
) -> None:
    spec = TrainSpec(device=device, attention=attention, max_steps=1)
    with pytest.raises(SlipstreamError) as caught:
        resolve_device(spec, cuda_available)
    assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED
    assert remedy in caught.value.remedy


def test_an_objective_is_a_name_or_a_mix() -> None:
    assert LossSpec().objective == {"cross_entropy": 1.0}
    assert LossSpec(objective="kl").model_dump()["objective"] == "kl"
    mix = LossSpec(objective={"cross_entropy": 0.5, "tv": 0.5})
    assert mix.model_dump()["objective"] == {"cross_entropy": 0.5, "tv": 0.5}
    assert LossSpec.model_validate_json(mix.model_dump_json()) == mix
    assert not LossSpec().needs_target_distribution
    assert mix.needs_target_distribution and LossSpec(objective="reverse_kl").needs_target_distribution
