"""Every way in which a target can be unfit is an error in words; fit ones load frozen, once, in the dtype asked for."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.errors
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from slipstream import target_loading
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_files import locate_target
from slipstream.target_loading import decoder_layers, load_causal_lm
from tests.unit.target_model.document_alone import VOCAB_SIZE, load_tiny_target, save_tiny_target


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny_target(tmp_path / "model")


def refusal(model: Path | str, device: str = "cpu", **spec: Any) -> SlipstreamError:
    with pytest.raises(SlipstreamError) as caught:
        load_causal_lm(TargetSpec(model=str(model), **spec), device)
    assert caught.value.remedy, "an error without a remedy"
    assert "\n" not in str(caught.value)
    return caught.value


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_directory_loads_frozen_in_the_dtype_asked_for(directory: Path, dtype: str) -> None:
    loaded = load_tiny_target(directory, dtype)

    assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, dtype)}
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert len(decoder_layers(loaded.model)) == 4
    assert loaded.tokenizer.is_fast
    assert loaded.tokenizer.chat_template
    assert [file.name for file in loaded.files.weights] == ["model.safetensors"]
    assert loaded.files.revision is None


def test_loading_prints_nothing_and_leaves_the_switches_of_transformers_alone(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    load_tiny_target(directory)

    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_sharded_weights_load_and_a_missing_shard_is_named(directory: Path) -> None:
    model = load_tiny_target(directory).model
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="200KB")
    assert not (directory / "model.safetensors").exists()

    loaded = load_tiny_target(directory)
    assert len(loaded.files.weights) > 1
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight)

    loaded.files.weights[1].unlink()
    assert loaded.files.weights[1].name in refusal(directory).message
    (directory / "model.safetensors.index.json").write_text("{broken")
    assert "index.json" in refusal(directory).message


def test_no_such_path(tmp_path: Path) -> None:
    for model in (tmp_path / "absent", "./absent", tmp_path / "absent.gguf"):
        error = refusal(model)
        assert "does not exist" in error.message
        assert error.reason is Reason.MODEL_INVALID


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.txt").write_text("x")
    assert "not a .gguf file" in refusal(tmp_path / "weights.txt").message


def test_a_directory_without_config(tmp_path: Path) -> None:
    assert "has no config.json" in refusal(tmp_path).message
    (tmp_path / "model.Q4.gguf").write_bytes(b"GGUF")
    assert "model.Q4.gguf" in refusal(tmp_path).remedy


def test_a_directory_without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    assert "has no weights" in refusal(directory).message
    (directory / "pytorch_model.bin").write_bytes(b"")
    error = refusal(directory)
    assert "only pickled weights (pytorch_model.bin)" in error.message
    assert error.reason is Reason.MODEL_INVALID


def test_a_directory_without_tokenizer(directory: Path) -> None:
    for file in directory.glob("*token*"):
        file.unlink()
    assert "has no tokenizer" in refusal(directory).message


def test_a_tokenizer_that_cannot_be_read(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    assert "The tokenizer of" in refusal(directory).message


def test_a_tokenizer_without_chat_template(directory: Path) -> None:
    for file in directory.glob("*.jinja"):
        file.unlink()
    edit_json(directory / "tokenizer_config.json", chat_template=None)
    error = refusal(directory)
    assert "has no chat template" in error.message
    assert "instruct variant" in error.remedy


def test_unreadable_config(directory: Path) -> None:
    (directory / "config.json").write_text("{broken")
    assert "config file" in refusal(directory).message


def test_a_config_field_of_the_wrong_type(directory: Path) -> None:
    edit_json(directory / "config.json", hidden_size="wide")
    assert "hidden_size" in refusal(directory).message


@pytest.mark.parametrize("model_type", ["not-known-to-anyone", "t5"])
def test_an_architecture_that_is_no_language_model(directory: Path, model_type: str) -> None:
    edit_json(directory / "config.json", model_type=model_type)
    assert "does not know as a causal language model" in refusal(directory).message


def test_an_architecture_without_decoder_layers(directory: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2)).save_pretrained(directory)
    assert "GPT2LMHeadModel is not supported" in refusal(directory).message


def test_code_that_ships_with_the_model_is_not_run(directory: Path) -> None:
    (directory / "custom.py").write_text("raise SystemExit('the code ran')")
    edit_json(
        directory / "config.json",
        model_type="custom",
        auto_map={"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"},
    )
    error = refusal(directory)
    assert "trust_remote_code is off" in error.message
    assert "target.trust_remote_code = true" in error.remedy


@pytest.mark.parametrize("keep", [0, 100, -1000])
def test_truncated_weights(directory: Path, keep: int) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert "could not be loaded" in refusal(directory).message


def test_weights_that_lack_tensors_are_not_made_up(directory: Path) -> None:
    edit_json(directory / "config.json", num_hidden_layers=5)
    error = refusal(directory)
    assert "lack 9 tensors" in error.message
    assert "model.layers.4." in error.message


def test_weights_of_another_size(directory: Path) -> None:
    edit_json(directory / "config.json", intermediate_size=96)
    assert "could not be loaded" in refusal(directory).message


def test_a_hub_name_without_network_or_cache() -> None:
    error = refusal("nobody-at-all/no-such-model", revision="0" * 40)
    assert "could not be downloaded" in error.message
    assert "network" in error.remedy
    assert "neither a path on this disk nor a hub name" in refusal("not a name!").message


@pytest.mark.parametrize(
    ("kind", "words"), [("GatedRepoError", "licence has to be accepted"), ("RepositoryNotFoundError", "it is private")]
)
def test_a_hub_name_without_a_token(monkeypatch: pytest.MonkeyPatch, kind: str, words: str) -> None:
    def unauthorized(*_arguments: object, **_settings: object) -> None:
        response = SimpleNamespace(status_code=401, headers={}, request=None)
        raise getattr(huggingface_hub.errors, kind)("401", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", unauthorized)
    error = refusal("meta/private-model")
    assert words in error.message and "HF_TOKEN" in error.remedy


def test_a_revision_of_a_local_directory(directory: Path) -> None:
    assert "has no revisions" in refusal(directory, revision="main").message


def test_a_hub_snapshot_is_found_in_the_cache_with_its_commit(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "a" * 40
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    directory.rename(repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    loaded = load_causal_lm(TargetSpec(model="some/model", dtype="float32"), "cpu")

    assert loaded.files.revision == commit
    assert loaded.files.root.name == commit


def test_cuda_without_a_cuda_device(directory: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    error = refusal(directory, device="cuda")
    assert error.reason is Reason.ENVIRONMENT_UNSUPPORTED
    assert "no CUDA device" in error.message


def test_gguf_without_its_packages_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(target_loading.importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    error = refusal(tmp_path / "model.gguf")
    assert error.reason is Reason.ENVIRONMENT_UNSUPPORTED
    assert error.message == "Reading model.gguf needs the package gguf, which is not installed."
    assert 'pip install "slipstream[gguf]"' in error.remedy


def test_a_broken_gguf_file(tmp_path: Path) -> None:
    _need("gguf", "accelerate")
    (tmp_path / "model.gguf").write_bytes(b"GGUF, but not really")
    assert "could not be loaded" in refusal(tmp_path / "model.gguf").message


def test_a_gguf_file_gives_what_transformers_reads_from_it(tmp_path: Path) -> None:
    """A tiny Llama written as GGUF: weights, tokenizer and template come back, and gguf is left as it was."""
    _need("gguf", "accelerate")
    import gguf

    reader = gguf.GGUFReader
    path = _write_gguf(tmp_path)
    loaded = load_causal_lm(TargetSpec(model=str(path), dtype="float32"), "cpu")

    assert gguf.GGUFReader is reader
    assert loaded.files.is_gguf
    assert isinstance(loaded.tokenizer, PreTrainedTokenizerFast)
    reference = load_tiny_target(tmp_path)
    for (name, ours), (_, theirs) in zip(
        sorted(loaded.model.state_dict().items()), sorted(reference.model.state_dict().items()), strict=True
    ):
        assert torch.equal(ours, theirs), name
    text = "The river could be crossed there."
    assert loaded.tokenizer(text)["input_ids"] == reference.tokenizer(text)["input_ids"]
    assert loaded.tokenizer.chat_template == reference.tokenizer.chat_template


def test_locating_a_target_does_not_import_torch(directory: Path) -> None:
    import subprocess

    code = (
        "import sys; from slipstream.run_spec.spec import TargetSpec\n"
        "from slipstream.target_files import locate_target\n"
        f"print(len(locate_target(TargetSpec(model={str(directory)!r})).weights)); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "1\n"
    assert locate_target(TargetSpec(model=str(directory))).root == directory


def _need(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def _write_gguf(directory: Path) -> Path:
    """Save a tiny Llama into `directory` as transformers does, and beside it as one GGUF file of the same content."""
    import gguf

    save_tiny_target(directory)
    loaded = load_tiny_target(directory)
    config, tokenizer = loaded.model.config, loaded.tokenizer
    path = directory / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    _write_tokenizer(writer, tokenizer)
    _write_tensors(writer, loaded.model.state_dict(), config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    import gguf

    description = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    added = set(tokenizer.added_tokens_decoder)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    kinds = (gguf.TokenType.CONTROL if index in added else gguf.TokenType.NORMAL for index in range(len(tokens)))
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges([" ".join(pair) for pair in description["merges"]])
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def _write_tensors(writer: Any, state: dict[str, torch.Tensor], config: Any) -> None:
    """llama.cpp keeps the two halves of a rotated head interleaved; transformers keeps one after the other."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in state.items():
        count = next((count for part, count in heads.items() if part in name), None)
        if count is not None:
            tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        base, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", tensor.contiguous().numpy())
