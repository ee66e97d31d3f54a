"""What is written in a format is read back bit for bit; what a reader cannot use is refused with both values."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModel

from drafter_trainer.drafter_config import FULL, SLIDING, DrafterConfig
from drafter_trainer.formats.drafter_format import Verifier, same_bits
from drafter_trainer.formats.module import as_module
from drafter_trainer.formats.published import FORMATS, read_published
from drafter_trainer.formats.published_config import PublishedConfig
from drafter_trainer.formats.self_test import our_hidden
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from tests.fakes.exports import drawn_weights, exportable_config

VERIFIER = Verifier("owner/target", ("LlamaForCausalLM",))
NAMES = list(FORMATS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def written(name: str, directory: Path, config: DrafterConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    weights = {key: tensor.to(dtype) for key, tensor in drawn_weights(config).items()}
    FORMATS[name].write(directory, PublishedConfig.of(config), weights, VERIFIER)
    return weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_exact(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = exportable_config(rms_norm_eps=1.3e-6, rope_theta=12345.5)
    weights = written(name, tmp_path, config, dtype)
    found = read_published(tmp_path)
    assert found.format_name == name
    assert not found.target_copies
    assert found.weights.keys() == weights.keys()
    assert all(same_bits(found.weights[key], tensor) for key, tensor in weights.items())
    unsaid = {"num_target_layers": None} if name == "vllm" else {}
    assert found.config == dataclasses.replace(PublishedConfig.of(config), **unsaid)
    FORMATS[name].check(tmp_path, PublishedConfig.of(config), weights)


@pytest.mark.parametrize("name", NAMES)
def test_a_second_round_writes_the_same_files(name: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    written(name, first, exportable_config())
    found = read_published(first)
    config = dataclasses.replace(found.config, num_target_layers=4)
    FORMATS[name].write(second, config, found.weights, VERIFIER)
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}


def test_numbers_of_target_layers(tmp_path: Path) -> None:
    config = exportable_config(target_layer_ids=(0, 3))
    values = {name: FORMATS[name].config_json(PublishedConfig.of(config), VERIFIER, torch.float32) for name in NAMES}
    assert values["vllm"]["aux_hidden_state_layer_ids"] == [1, 4]
    assert values["sglang"]["dflash_config"]["target_layer_ids"] == [0, 3]
    assert values["zlab"]["dflash_config"]["target_layer_ids"] == [0, 3]
    assert {v.get("mask_token_id", v.get("dflash_config", {}).get("mask_token_id")) for v in values.values()} == {384}
    proposals = values["vllm"]["speculators_config"]["proposal_methods"]
    assert proposals[0]["speculative_tokens"] == config.block_size - 1


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("types", [(FULL, FULL), (FULL, SLIDING)], ids=["full", "mixed"])
def test_transformers_loads_zlab_and_computes_the_same(types: tuple[str, str], tmp_path: Path) -> None:
    """With the modelling file that lies beside the weights, which is the one that the self-test uses."""
    config = exportable_config(layer_types=types, sliding_window=6 if SLIDING in types else None)
    weights = written("zlab", tmp_path, config)
    theirs = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert theirs.block_size == 4 and theirs.target_layer_ids == [1, 2]
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(11, 2 * 64, generator=generator)
    block = torch.randn(4, 64, generator=generator)
    with torch.inference_mode():
        ours = our_hidden(as_module(config, weights), block, features)
        found = theirs(block[None], features[None], torch.arange(15)[None])[0, 1:]
    torch.testing.assert_close(found, ours, rtol=1e-5, atol=1e-5)


def test_vllm_refuses_a_mixed_layout(tmp_path: Path) -> None:
    config = exportable_config(layer_types=(FULL, SLIDING), sliding_window=8)
    with pytest.raises(SlipstreamError, match="sliding_window_non_causal") as caught:
        written("vllm", tmp_path, config)
    assert "['full_attention', 'sliding_attention']" in caught.value.message
    assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("types", "non_causal"), [((FULL, FULL), True), ((SLIDING, SLIDING), False)])
def test_vllm_is_told_whether_layers_are_causal(types: tuple[str, str], non_causal: bool, tmp_path: Path) -> None:
    config = exportable_config(layer_types=types, sliding_window=8 if SLIDING in types else None)
    written("vllm", tmp_path, config)
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window_non_causal"] is non_causal
    assert read_published(tmp_path).config.layer_types == types


# ---- what is refused

Tensors = dict[str, Tensor]


def _without(tensors: Tensors) -> None:
    del tensors["layers.1.mlp.up_proj.weight"]


def _with_another(tensors: Tensors) -> None:
    tensors["layers.2.mlp.up_proj.weight"] = torch.zeros(96, 64)


def _misshapen(tensors: Tensors) -> None:
    tensors["fc.weight"] = torch.zeros(64, 64)


def _not_a_number(tensors: Tensors) -> None:
    tensors["norm.weight"][5] = torch.nan


def _integers(tensors: Tensors) -> None:
    tensors["norm.weight"] = torch.ones(64, dtype=torch.int64)


def _of_eight_bits(tensors: Tensors) -> None:
    """torch cannot say of these whether they are finite."""
    tensors["norm.weight"] = torch.ones(64).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without, r"1 tensors are missing \(layers.1.mlp.up_proj.weight\)"),
        (_with_another, r"1 tensors are not known \(layers.2.mlp.up_proj.weight\)"),
        (_misshapen, r"fc.weight is \[64, 64\], expected \[64, 128\]"),
        (_not_a_number, "norm.weight holds 1 values that are not finite"),
        (_integers, "norm.weight is torch.int64, expected float32"),
        (_of_eight_bits, "norm.weight is torch.float8_e4m3fn, expected float32"),
    ],
)
def test_other_tensors_are_named(name: str, damage: Callable[[Tensors], None], words: str, tmp_path: Path) -> None:
    tensors = written(name, tmp_path, exportable_config())
    damage(tensors)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SlipstreamError, match=words) as caught:
        read_published(tmp_path)
    assert caught.value.reason is Reason.CHECKPOINT_INVALID


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("vllm", {"speculators_version": "0.10.0"}, "speculators_version is '0.10.0', expected at most 0.9.0"),
        ("vllm", {"sample_from_anchor": True}, "sample_from_anchor is True, expected False"),
        ("vllm", {"draft_vocab_size": 100}, "draft_vocab_size is 100, expected 392"),
        ("vllm", {"aux_hidden_state_layer_ids": [0, 2]}, r"\[0, 2\], expected numbers from 1 on"),
        ("vllm", {"block_size": 5}, "speculative_tokens is 3, expected block_size - 1 = 4"),
        ("vllm", {"block_size": "4"}, "block_size is '4', expected a whole number from 2 to 64"),
        ("sglang", {"block_size": 10**12}, "block_size is 1000000000000, expected a whole number from 2 to 64"),
        ("sglang", {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, expected .* from 1 to 1024"),
        ("sglang", {"vocab_size": 10**12}, "vocab_size is 1000000000000, expected a whole number from 1 on"),
        ("sglang", {"rope_parameters": {"rope_theta": math.inf}}, "rope_theta is inf, expected a positive number"),
        ("vllm", {"transformer_layer_config": None}, "transformer_layer_config is None, expected a table"),
        ("sglang", {"architectures": ["Llama"]}, r"architectures is \['Llama'\], expected \['DFlashDraftModel'\]"),
        ("sglang", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ("sglang", {"rope_scaling": {"rope_type": "yarn"}}, "of type 'yarn', expected 'default'"),
        ("sglang", {"rope_theta": 5.0}, "rope_theta is 5.0, but rope_parameters says 10000.0"),
        ("sglang", {"layer_types": [FULL]}, "expected 2 of 'full_attention'"),
        ("zlab", {"dflash_config": {"target_layer_ids": [2, 1], "mask_token_id": 1}}, "expected ascending numbers"),
        ("zlab", {"dflash_config": {"projector_type": "domino"}}, "projector_type is 'domino', expected nothing"),
        ("zlab", {"dflash_config": None, "auto_map": None}, "dflash_config is None, expected a table"),
    ],
)
def test_other_configurations_are_named(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    written(name, tmp_path, exportable_config())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(SlipstreamError, match=words) as caught:
        read_published(tmp_path)
    assert caught.value.reason is Reason.CHECKPOINT_INVALID


def test_a_sliding_layer_that_sees_what_follows(tmp_path: Path) -> None:
    written("vllm", tmp_path, exportable_config(layer_types=(SLIDING, SLIDING), sliding_window=8))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window_non_causal": True}))
    words = "sliding_window_non_causal is True with layers .'sliding_attention', .*expected False or nothing"
    with pytest.raises(SlipstreamError, match=words):
        read_published(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "config.json cannot be read"),
        ("{", "no JSON"),
        ("[]", "is a JSON list, expected an object"),
        ('{"architectures": ["LlamaForCausalLM"]}', "LlamaForCausalLM.*expected a DFlash drafter"),
    ],
)
def test_what_is_no_drafter(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(SlipstreamError, match=words):
        read_published(tmp_path)


def test_a_torn_file_and_a_missing_shard(tmp_path: Path) -> None:
    written("sglang", tmp_path, exportable_config())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(SlipstreamError, match="no whole safetensors file"):
        read_published(tmp_path)
    weights.unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "model-1.safetensors"}}))
    with pytest.raises(SlipstreamError, match="model-1.safetensors cannot be read"):
        read_published(tmp_path)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../secret.safetensors"}}))
    with pytest.raises(SlipstreamError, match="do not lie beside it"):
        read_published(tmp_path)


def test_shards_are_read(tmp_path: Path) -> None:
    weights = written("sglang", tmp_path, exportable_config())
    (tmp_path / "model.safetensors").unlink()
    parts = {f"model-{number}.safetensors": dict(list(weights.items())[number::2]) for number in range(2)}
    for name, part in parts.items():
        safetensors.torch.save_file(part, tmp_path / name)
    names = {key: name for name, part in parts.items() for key in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert read_published(tmp_path).weights.keys() == weights.keys()
