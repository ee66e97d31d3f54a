"""Quantised checkpoints give what transformers gives, or are refused in words before their weights are read."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import finegrained_fp8

from slipstream import quantised_target
from slipstream.errors import SlipstreamError
from slipstream.quantised_target import Quantisation, QuantisedLoading, find_quantisation, plan_loading
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_facts import read_target_facts
from slipstream.target_files import locate_target
from slipstream.target_loading import _place, load_causal_lm
from slipstream.tensor_parallel import check_divisible
from target_server.target_model import TargetModel
from tests.fakes.quantised_models import (
    edit_quantisation,
    quantise_to_compressed_tensors,
    quantise_to_fp8,
    quantise_with_torchao,
)
from tests.fakes.tiny_models import Family
from tests.unit.target_model.document_alone import load_reference, load_tiny_target, save_tiny_target
from tests.unit.target_model.test_packed_forward import LENGTHS, alone, by_layer, largest_error, random_tokens


def need(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def spec_of(directory: Path, **fields: Any) -> TargetSpec:
    return TargetSpec(model=str(directory), **({"dtype": "float32"} | fields))


def refusal(directory: Path, **fields: Any) -> SlipstreamError:
    with pytest.raises(SlipstreamError) as caught:
        load_causal_lm(spec_of(directory, **fields), "cpu")
    assert caught.value.remedy and "\n" not in str(caught.value)
    return caught.value


def transformers_own(directory: Path, loading: QuantisedLoading) -> PreTrainedModel:
    """Told to dequantise where it is: where there is a GPU, it would not for a CPU."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **loading.arguments
    )
    return model.eval()


# Smaller than a block of 128, one block, and several.
@pytest.mark.parametrize(("family", "width"), [("llama", 64), ("qwen3", 128), ("qwen3_moe", 128), ("qwen3", 256)])
def test_fp8_gives_what_transformers_gives_for_each_document_alone(family: Family, width: int, tmp_path: Path) -> None:
    need("accelerate")
    meant = quantise_to_fp8(save_tiny_target(tmp_path, family, hidden_size=width))
    loaded = load_causal_lm(spec_of(tmp_path), "cpu")
    assert loaded.quantised is not None
    reference = transformers_own(tmp_path, loaded.quantised)
    target, tokens = TargetModel(loaded, spec_of(tmp_path), "f"), random_tokens(sum(LENGTHS))

    captured = target.capture(tokens, LENGTHS, range(4), True)

    for ours, theirs in zip(by_layer(captured, 4), alone(reference, tokens, LENGTHS), strict=True):
        assert ours.dtype == torch.float32
        assert largest_error(ours, theirs) < 1e-5
    frozen = target.frozen_weights()
    for name, key in (("embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head"), ("norm", "model.norm")):
        assert torch.equal(frozen[f"{name}.weight"], meant[f"{key}.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_is_dequantised_to_the_weights_it_stands_for(dtype: str, tmp_path: Path) -> None:
    need("accelerate")
    meant = quantise_to_fp8(save_tiny_target(tmp_path, "qwen3", hidden_size=256))
    loaded = load_causal_lm(spec_of(tmp_path, dtype=dtype), "cpu")

    assert str(loaded.quantised) == f"fp8, dequantised to {dtype}: on cpu nothing multiplies them"
    weights = loaded.model.state_dict()
    assert weights.keys() == meant.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, meant[name].to(getattr(torch, dtype))), name


def test_a_quantised_target_is_another_target(tmp_path: Path) -> None:
    need("accelerate")
    plain = save_tiny_target(tmp_path / "plain", hidden_size=128)
    quantise_to_fp8(Path(shutil.copytree(plain, tmp_path / "fp8")))
    ours, theirs = (TargetModel.load(spec_of(path), device="cpu") for path in (tmp_path / "fp8", plain))
    assert ours.fingerprint != theirs.fingerprint
    assert ours.config == theirs.config


def test_quantised_weights_are_not_spread_over_devices(tmp_path: Path) -> None:
    need("accelerate")
    quantise_to_fp8(save_tiny_target(tmp_path, hidden_size=128))
    with pytest.raises(SlipstreamError, match="quant_method 'fp8'.*not spread over several devices") as caught:
        check_divisible(spec_of(tmp_path), locate_target(spec_of(tmp_path)), 2)
    assert caught.value.reason is Reason.MODEL_INVALID


@pytest.mark.parametrize("width", [192, 320])
def test_blocks_that_transformers_would_divide_wrongly(width: int, tmp_path: Path) -> None:
    """192 rows in blocks of 128 have two scales: transformers takes two blocks of 96, and says nothing."""
    need("accelerate")
    quantise_to_fp8(save_tiny_target(tmp_path, hidden_size=width))
    error = refusal(tmp_path)
    assert error.reason is Reason.MODEL_INVALID
    assert f"has {width} rows or columns, no multiple of its FP8 blocks (128 by 128)" in error.message


@pytest.mark.parametrize("activations", [False, True])
def test_compressed_tensors_give_what_transformers_gives(activations: bool, tmp_path: Path) -> None:
    need("compressed_tensors", "accelerate")
    meant = quantise_to_compressed_tensors(
        save_tiny_target(tmp_path, "qwen3", hidden_size=128), activations=activations
    )
    loaded = load_causal_lm(spec_of(tmp_path), "cpu")
    assert str(loaded.quantised).startswith("compressed-tensors, dequantised to float32: the package would do so in")
    weights = dict(loaded.model.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in meant.items())
    assert loaded.quantised is not None
    reference = transformers_own(tmp_path, loaded.quantised)
    target, tokens = TargetModel(loaded, spec_of(tmp_path), "f"), random_tokens(sum(LENGTHS))
    captured = target.capture(tokens, LENGTHS, range(4), True)
    for ours, theirs in zip(by_layer(captured, 4), alone(reference, tokens, LENGTHS), strict=True):
        if activations:  # older transformers round them: a difference in the last bit becomes one of FP8's few numbers
            assert (ours - theirs).abs().mean() < 0.01 * theirs.abs().mean()
        else:
            assert largest_error(ours, theirs) < 1e-5


def test_torchao_gives_what_transformers_gives_from_weights_that_stay_packed(tmp_path: Path) -> None:
    need("torchao", "accelerate")
    quantise_with_torchao(save_tiny_target(tmp_path, "qwen3", hidden_size=128))
    loaded = load_causal_lm(spec_of(tmp_path), "cpu")
    assert type(loaded.model.model.layers[0].mlp.up_proj.weight).__module__.startswith("torchao")
    assert str(loaded.quantised) == "torchao, as transformers computes with it"
    target, tokens = TargetModel(loaded, spec_of(tmp_path), "f"), random_tokens(sum(LENGTHS))
    captured = target.capture(tokens, LENGTHS, range(4), True)
    for ours, theirs in zip(by_layer(captured, 4), alone(load_reference(tmp_path), tokens, LENGTHS), strict=True):
        assert largest_error(ours, theirs) < 1e-5


@pytest.mark.parametrize(
    ("method", "packages"),
    [
        ("gptq", "optimum and gptqmodel"),
        ("awq", "gptqmodel"),
        ("bitsandbytes", "bitsandbytes"),
        ("torchao", "torchao"),
        ("compressed-tensors", "compressed-tensors"),
        ("fp8", "accelerate"),
        ("mxfp4", "accelerate"),
    ],
)
def test_a_missing_package_is_named_before_weights_are_read(
    method: str, packages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_target(tmp_path)
    edit_quantisation(tmp_path, {"quant_method": method})
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    names = packages.replace("-", "_").split(" and ")
    monkeypatch.setattr(quantised_target.importlib.util, "find_spec", lambda name: None if name in names else object())
    error = refusal(tmp_path)
    assert error.reason is Reason.ENVIRONMENT_UNSUPPORTED
    assert f"quant_method {method!r} in config.json" in error.message
    assert f"reads with {packages}, not installed here" in error.message
    assert f"pip install {packages.replace(' and ', ' ')}" in error.remedy


def test_a_method_that_transformers_does_not_know_is_not_loaded_without_scales(tmp_path: Path) -> None:
    quantise_to_fp8(save_tiny_target(tmp_path))
    edit_quantisation(tmp_path, {"quant_method": "modelopt"})
    assert "quantised with 'modelopt', which the installed transformers (" in refusal(tmp_path).message
    edit_quantisation(tmp_path, {"bits": 4})
    assert "a quantization_config without a quant_method" in refusal(tmp_path).message
    edit_quantisation(tmp_path, None)
    assert "no quantization_config, so transformers would take the numbers" in refusal(tmp_path).message


@pytest.mark.parametrize(
    "wrong", [{"activation_scheme": "odd"}, {"activation_scheme": 3}, {"weight_block_size": [128]}]
)
def test_settings_that_say_something_impossible(wrong: dict[str, Any], tmp_path: Path) -> None:
    need("accelerate")
    quantise_to_fp8(save_tiny_target(tmp_path))
    edit_quantisation(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]} | wrong)
    error = refusal(tmp_path)
    assert error.reason is Reason.MODEL_INVALID and "quant_method 'fp8'), and could not be loaded" in error.message


def test_what_transformers_itself_lacks_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that only transformers knows what it needs, and one that needs a GPU."""
    save_tiny_target(tmp_path)
    edit_quantisation(tmp_path, {"quant_method": "sinq"})
    error = refusal(tmp_path)
    assert error.reason is Reason.ENVIRONMENT_UNSUPPORTED
    assert "transformers lacks something to read them" in error.message and "sinq" in error.message
    monkeypatch.setattr(quantised_target.importlib.util, "find_spec", lambda _name: object())
    edit_quantisation(tmp_path, {"quant_method": "spqr", "beta1": 16, "beta2": 16, "bits": 3, "shapes": {}})
    if not torch.cuda.is_available():
        assert "could not be loaded onto cpu" in refusal(tmp_path).message


def test_a_broken_configuration_is_left_to_who_reads_it(tmp_path: Path) -> None:
    files = locate_target(spec_of(save_tiny_target(tmp_path)))
    assert find_quantisation(spec_of(tmp_path), files) is None
    for text in ("{broken", "[]", '{"quantization_config": null}', '{"quantization_config": {}}'):
        (tmp_path / "config.json").write_text(text)
        assert find_quantisation(spec_of(tmp_path), files) is None
    (tmp_path / "config.json").write_text('{"text_config": {"quantization_config": {"quant_method": "fp8"}}}')
    found = find_quantisation(spec_of(tmp_path), files)
    assert found is not None and found.method == "fp8"
    (tmp_path / "config.json").write_text('{"quantization_config": {"load_in_4bit": true}}')
    with pytest.raises(SlipstreamError, match="bitsandbytes"):
        find_quantisation(spec_of(tmp_path), files)


def test_what_a_gpu_would_do_with_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Quantisation("fp8", {"quant_method": "fp8", "weight_block_size": [128, 128]})
    cuda, capability, kernels = torch.device("cuda"), (9, 0), None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(
        quantised_target.importlib.util, "find_spec", lambda name: kernels if name == "kernels" else object()
    )

    def why(dtype: str = "bfloat16") -> str | None:
        return plan_loading(found, TargetSpec(model="m", dtype=dtype), cuda).why_dequantised  # type: ignore[arg-type]

    assert why() == "the package kernels is not installed"
    assert why("float32") == "target.dtype is float32"
    capability = (8, 0)
    assert why() == "the GPU cannot multiply FP8"
    capability, kernels = (9, 0), object()

    class UnreachableError(Exception):
        """As the clients of a hub raise them: of no common kind."""

    def fetch() -> None:
        raise UnreachableError("no route to host\nmore")

    monkeypatch.setattr(finegrained_fp8, "load_finegrained_fp8_kernel", fetch)
    assert why() == "the kernel for them could not be loaded (UnreachableError: no route to host)"
    monkeypatch.setattr(finegrained_fp8, "load_finegrained_fp8_kernel", lambda: None)
    assert why() is None
    # What it takes from the file is kept, also where it is loaded as it is.
    loading = QuantisedLoading(Quantisation("fp8", found.settings | {"modules_to_not_convert": ["x"]}), "w", "bfloat16")
    config = loading.arguments["quantization_config"]
    assert (config.dequantize, config.modules_to_not_convert) == (True, ["x"])
    assert QuantisedLoading(found, None, "bfloat16").arguments == {}


def test_a_quantised_model_is_moved_only_if_it_is_elsewhere(tmp_path: Path) -> None:
    model = load_tiny_target(save_tiny_target(tmp_path)).model
    model.is_quantized, moves = True, []
    model.to = moves.append
    _place(model, torch.device("cpu"))
    assert not moves
    _place(model, torch.device("meta"))
    model.is_quantized = False
    _place(model, torch.device("cpu"))
    assert moves == [torch.device("meta"), torch.device("cpu")]


@pytest.mark.parametrize("part", ["embed_tokens", "lm_head"])
def test_a_quantised_embedding_or_head_is_refused(part: str, tmp_path: Path) -> None:
    loaded = load_tiny_target(save_tiny_target(tmp_path))
    owner = loaded.model.model if part == "embed_tokens" else loaded.model
    weight = getattr(owner, part).weight
    named = "embedding" if part == "embed_tokens" else "head"
    for packed in (weight.to(torch.float8_e4m3fn), weight.to(torch.int8), None):
        module = nn.Module()
        if packed is not None:
            module.weight = nn.Parameter(packed, requires_grad=False)
        setattr(owner, part, module)
        with pytest.raises(SlipstreamError, match=f"The {named} of the target is quantised") as caught:
            read_target_facts(loaded.model, loaded.tokenizer)
        assert caught.value.reason is Reason.MODEL_INVALID
