"""Sizes of a target from config.json, GGUF and numbers; what is missing or broken is named."""

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.gguf_header import read_gguf_header
from slipstream.hub_reach import why_unreachable
from slipstream.plan.gpus import GPUS, assumed_share, gpu_named
from slipstream.plan.sizes import RunSizes, TargetSizes
from slipstream.plan.target_sizes import sizes_of_config, target_sizes
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec, TargetSpec
from tests.fakes.gguf_files import gguf_without_weights
from tests.unit.plan.sizes import A, C

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
EXPECTED = TargetSizes(36, 4096, 12288, 32, 8, 128, 151_936, False)
NAMELESS = TargetSpec(model="nobody/nothing")


def write_config(directory: Path, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps({key: value for key, value in (QWEN3 | changes).items() if value is not None}))
    return path


def test_a_config_by_file_by_directory_and_by_the_recipe(tmp_path: Path) -> None:
    path = write_config(tmp_path / "model")
    assert target_sizes(NAMELESS, str(path)) == EXPECTED
    assert target_sizes(NAMELESS, str(path.parent)) == EXPECTED
    assert target_sizes(TargetSpec(model=str(path.parent))) == EXPECTED


def test_what_a_config_may_leave_out() -> None:
    config = {key: value for key, value in QWEN3.items() if key not in ("num_key_value_heads", "head_dim")}
    sizes = sizes_of_config(config, "here")
    assert (sizes.num_key_value_heads, sizes.head_dim, sizes.tie_word_embeddings) == (32, 128, False)
    assert sizes_of_config({**config, "model_type": "gemma2"}, "here").tie_word_embeddings
    nested = {"model_type": "some_vl", "tie_word_embeddings": True, "text_config": QWEN3}
    assert sizes_of_config(nested, "here").tie_word_embeddings


def test_numbers() -> None:
    text = "num_layers=36,hidden_size=4096, intermediate_size=12288,num_attention_heads=32,num_key_value_heads=8"
    assert target_sizes(NAMELESS, f"{text},vocab_size=151936") == EXPECTED
    assert target_sizes(NAMELESS, f"{text},vocab_size=151936,tie_word_embeddings=true").tie_word_embeddings


@pytest.mark.parametrize(
    ("given", "reason", "words"),
    [
        ("hidden_size=0", Reason.SPEC_INVALID, "hidden_size is '0'"),
        ("hidden=3", Reason.SPEC_INVALID, "'hidden' is no size"),
        ("hidden_size=-4", Reason.SPEC_INVALID, "no positive number"),
        ("hidden_size=64", Reason.MODEL_INVALID, "num_hidden_layers, intermediate_size"),
        ("/nowhere/config.json", Reason.MODEL_INVALID, "does not exist"),
    ],
)
def test_wrong_descriptions_are_refused_in_words(given: str, reason: Reason, words: str) -> None:
    with pytest.raises(SlipstreamError) as refused:
        target_sizes(NAMELESS, given)
    assert refused.value.reason is reason and words in refused.value.message and refused.value.remedy


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 16, b"\xff\xfe{}"])
def test_broken_files_are_refused_in_words(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(SlipstreamError) as refused:
        target_sizes(NAMELESS, str(path))
    assert refused.value.reason is Reason.MODEL_INVALID and str(path) in refused.value.message


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="neither config.json nor a .gguf file"):
        target_sizes(TargetSpec(model=str(tmp_path)))


def test_a_path_that_leads_nowhere_is_no_hub_name(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="does not exist"):
        target_sizes(TargetSpec(model=str(tmp_path / "absent")))


def test_a_hub_name_that_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(SlipstreamError) as refused:
        target_sizes(NAMELESS)
    assert "nobody/nothing" in refused.value.message and "--target-config" in refused.value.remedy


def test_a_hub_that_cannot_be_reached_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    for name in ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert why_unreachable(address, 60.0) is None
    assert why_unreachable("http://127.0.0.1:1", 60.0) == "Connection refused"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(SlipstreamError, match=r"http://127\.0\.0\.1:1 cannot be reached: Connection refused"):
        target_sizes(NAMELESS)
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:2")
    assert why_unreachable("http://hub.invalid") is None, "the proxy knows"


def test_what_the_hub_cache_has_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    commit = "0" * 40
    write_config(tmp_path / "models--some--model")
    model = tmp_path / "models--some--model"
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "config.json").rename(model / "snapshots" / commit / "config.json")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: pytest.fail("the hub was asked"))
    assert target_sizes(TargetSpec(model="some/model")) == EXPECTED


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_says_it_in_its_header(tied: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_without_weights(tied=tied) + b"weights")
    assert target_sizes(TargetSpec(model=str(path))) == TargetSizes(30, 576, 1536, 9, 3, 64, 49_152, tied)
    assert target_sizes(NAMELESS, str(tmp_path)) == TargetSizes(30, 576, 1536, 9, 3, 64, 49_152, tied)
    header = read_gguf_header(path)
    assert header.values["tokenizer.ggml.tokens"] == 2 and header.values["general.flag"] is True


def test_a_header_that_ends_too_early(tmp_path: Path) -> None:
    whole = gguf_without_weights(tied=True)
    for length in range(5, len(whole) - 12, 7):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(SlipstreamError, match="cannot be read as a GGUF file"):
            read_gguf_header(path)


def test_a_recipe_and_its_target_make_size_a() -> None:
    spec = RunSpec.model_validate(
        {
            "name": "a",
            "target": {"model": "Qwen/Qwen3-8B"},
            "data": {"files": ["a.jsonl"], "pack_tokens": 4096},
            "train": {"max_steps": 1},
        }
    )
    assert RunSizes.of(spec, EXPECTED) == A
    with pytest.raises(SlipstreamError, match="no multiple of"):
        RunSizes.of(RunSpec.model_validate(spec.model_dump() | {"drafter": {"num_key_value_heads": 5}}), EXPECTED)
    with pytest.raises(SlipstreamError, match="head_dim is 125, rotary positions need an even one"):
        RunSizes.of(spec, replace(EXPECTED, head_dim=125))


def test_cards_by_the_names_that_torch_gives() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H200": "H200",
        "NVIDIA A100-SXM4-40GB": "A100 40GB",
        "NVIDIA A100 80GB PCIe": "A100 80GB",
        "NVIDIA GeForce RTX 4090": "RTX 4090",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
    }
    for given, expected in names.items():
        found = gpu_named(given)
        assert found is not None and found.name == expected
    assert gpu_named("AMD Instinct") is None
    assert [gpu.memory_bytes for gpu in GPUS] == sorted(gpu.memory_bytes for gpu in GPUS)
    assert assumed_share(C) == pytest.approx(0.18) and assumed_share(A) == pytest.approx(0.55)
