"""Exports are tested by decoding, appear whole or not at all, and say where they come from."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from drafter_trainer.checkpoint_state import newest_checkpoint
from drafter_trainer.cli import main
from drafter_trainer.formats.export import export
from drafter_trainer.formats.first_weights import TrainedTarget, read_first_weights
from drafter_trainer.formats.module import as_module
from drafter_trainer.formats.published import FORMATS, read_published
from drafter_trainer.formats.self_test import TargetReader, compare_forward, run_self_test
from drafter_trainer.formats.sglang import SglangFormat
from drafter_trainer.formats.vllm import VllmFormat
from slipstream.checkpoint_name import find_checkpoint
from slipstream.errors import SlipstreamError
from slipstream.eval_prompts import end_ids
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_loading import load_causal_lm
from tests.fakes.exports import drawn_weights, exportable_config, write_checkpoint
from tests.fakes.hub_cache import COMMIT, put_into_cache
from tests.fakes.tiny_run import write_target, write_tiny_run
from tests.unit.formats.conftest import Source, make_plan

NAMES = list(FORMATS)


@pytest.fixture(scope="module")
def reader(source: Source) -> TargetReader:
    loaded = load_causal_lm(TargetSpec(model=str(source.target), dtype="float32"), "cpu")
    return TargetReader(loaded, 1.0, end_ids(loaded))


@pytest.fixture(scope="module")
def exports(source: Source, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All three formats, tested by decoding; read-only."""
    directory = tmp_path_factory.mktemp("exports")
    for name in NAMES:
        found = export(make_plan(source, directory / name, name))
        assert found is not None and found.drafts == found.equal_drafts > 100
        assert found.accepted_length == found.accepted_length_of_files >= 1.0
    return {name: directory / name for name in NAMES}


# ---- the self-test


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_export_drafts_what_the_checkpoint_drafts(
    name: str, exports: dict[str, Path], reader: TargetReader, source: Source
) -> None:
    found = run_self_test(reader, as_module(source.config, source.weights), exports[name], ("Why?",))
    assert found.equal_drafts == found.drafts > 0


def _layer_too_high(values: dict[str, Any]) -> None:
    if "aux_hidden_state_layer_ids" in values:
        values["aux_hidden_state_layer_ids"] = [layer + 1 for layer in values["aux_hidden_state_layer_ids"]]
    else:
        values["dflash_config"]["target_layer_ids"] = [n + 1 for n in values["dflash_config"]["target_layer_ids"]]


def _layer_too_low(values: dict[str, Any]) -> None:
    if "aux_hidden_state_layer_ids" in values:
        values["aux_hidden_state_layer_ids"] = [layer - 1 for layer in values["aux_hidden_state_layer_ids"]]
    else:
        values["dflash_config"]["target_layer_ids"] = [n - 1 for n in values["dflash_config"]["target_layer_ids"]]


def _slot_shifted(values: dict[str, Any]) -> None:
    values["sample_from_anchor"] = True


def _slot_more(values: dict[str, Any]) -> None:
    values["block_size"] += 1


def _other_mask(values: dict[str, Any]) -> None:
    holder = values if "mask_token_id" in values else values["dflash_config"]
    holder["mask_token_id"] += 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plant", [_layer_too_high, _layer_too_low, _slot_shifted, _slot_more, _other_mask])
def test_a_planted_off_by_one_is_caught(
    name: str,
    plant: Callable[[dict[str, Any]], None],
    exports: dict[str, Path],
    reader: TargetReader,
    source: Source,
    tmp_path: Path,
) -> None:
    shutil.copytree(exports[name], tmp_path / "planted")
    config = tmp_path / "planted" / "config.json"
    values = json.loads(config.read_text())
    plant(values)
    config.write_text(json.dumps(values))
    with pytest.raises(SlipstreamError, match=r"self-test failed.*(drafted tokens differ|the files read)") as caught:
        run_self_test(reader, as_module(source.config, source.weights), tmp_path / "planted", ("Why?",))
    assert caught.value.reason is Reason.CHECKPOINT_INVALID


@pytest.mark.parametrize("form", [VllmFormat, SglangFormat])
def test_writer_and_reader_with_the_same_mistake_are_caught(
    form: type[VllmFormat], source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading back alone would find nothing, and no directory appears."""
    to_json, parse = form.config_json, form.parse_config

    def config_json(self: Any, config: Any, *rest: Any) -> dict[str, Any]:
        layers = tuple(layer + 1 for layer in config.target_layer_ids)
        return to_json(self, dataclasses.replace(config, target_layer_ids=layers), *rest)

    def parse_config(self: Any, *arguments: Any) -> Any:
        config = parse(self, *arguments)
        return dataclasses.replace(config, target_layer_ids=tuple(layer - 1 for layer in config.target_layer_ids))

    monkeypatch.setattr(form, "config_json", config_json)
    monkeypatch.setattr(form, "parse_config", parse_config)
    with pytest.raises(SlipstreamError, match=r"self-test failed.*drafted tokens differ; accepted length \d"):
        export(make_plan(source, tmp_path / "out", form.name))
    assert not list(tmp_path.iterdir())


def test_swapped_features_are_caught(
    exports: dict[str, Path], reader: TargetReader, source: Source, tmp_path: Path
) -> None:
    """With a target, and also without one: the comparison on drawn features sees everything but layer numbers."""
    assert compare_forward(exports["vllm"], as_module(source.config, source.weights)) < 1e-5
    shutil.copytree(exports["vllm"], tmp_path / "x")
    weights = safetensors.torch.load_file(tmp_path / "x" / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"].roll(64, dims=1).contiguous()
    safetensors.torch.save_file(weights, tmp_path / "x" / "model.safetensors")
    with pytest.raises(SlipstreamError, match="hidden states differ"):
        compare_forward(tmp_path / "x", as_module(source.config, source.weights))
    with pytest.raises(SlipstreamError, match="drafted tokens differ"):
        run_self_test(reader, as_module(source.config, source.weights), tmp_path / "x", ("Why?",))


@pytest.mark.usefixtures("own_modules")
def test_the_modelling_file_generates_what_the_target_does(exports: dict[str, Path], reader: TargetReader) -> None:
    from transformers import AutoModel

    drafter = AutoModel.from_pretrained(exports["zlab"], trust_remote_code=True)
    model, ids = reader.target.model, torch.tensor([[5, 6, 7, 8]])
    plain = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, eos_token_id=None
    )
    assert drafter.spec_generate(model, ids, 9).tolist() == plain.tolist()
    stop = plain[0, 6].item()
    stopped = drafter.spec_generate(model, ids, 9, stop_token_ids=[stop])[0].tolist()
    assert stopped == plain[0].tolist()[: len(stopped)] and stopped[-1] == stop


# ---- dtype, card, record


def test_another_dtype_is_tested_against_the_rounded_weights(source: Source, tmp_path: Path) -> None:
    found = export(make_plan(source, tmp_path / "out", "vllm", dtype="bfloat16"))
    assert found is not None and found.passed
    assert {tensor.dtype for tensor in read_published(tmp_path / "out").weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_import_says_what_a_recipe_needs(
    exports: dict[str, Path], source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(exports["vllm"]), "--target", str(source.target)]) == 0
    printed = capsys.readouterr().out
    assert f'init_from = "{exports["vllm"]}"' in printed
    assert "block_size = 4" in printed and "target_layer_ids = [1, 2]" in printed and "accepted length" in printed


def test_import_of_a_drafter_of_a_hub_names_its_commit(
    exports: dict[str, Path],
    source: Source,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = put_into_cache(tmp_path / "cache", "some/drafter")
    shutil.copytree(exports["sglang"], snapshot, dirs_exist_ok=True)
    assert main(["import", "some/drafter", "--target-model", str(source.target)]) == 0
    assert f'init_from = "some/drafter@{COMMIT}"' in capsys.readouterr().out


@pytest.mark.parametrize(("form", "last", "warned"), [("sglang", 3, True), ("sglang", 2, False), ("vllm", 3, False)])
def test_sglang_does_not_read_the_last_layer(
    form: str, last: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = exportable_config(target_layer_ids=(1, last))
    checkpoint = write_checkpoint(write_tiny_run(tmp_path / "run"), tmp_path / "of", config, drawn_weights(config))
    source = Source(tmp_path / "of", checkpoint, tmp_path / "run" / "target", config, {})
    with caplog.at_level(logging.WARNING):
        export(make_plan(source, tmp_path / "out", form, target=None))
    assert ("sglang_does_not_read_the_last_layer" in [one.getMessage() for one in caplog.records]) == warned


# ---- what is refused


def test_a_taken_name(source: Source, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "keep").write_text("mine")
    with pytest.raises(SlipstreamError, match="is a directory that is not empty, expected a new name"):
        export(make_plan(source, output, target=None))
    assert (output / "keep").read_text() == "mine"
    with pytest.raises(SlipstreamError, match="is a directory that is not empty, expected a new name"):
        export(make_plan(source, output, target=None, replace=True))
    (output / "keep").unlink()
    export(make_plan(source, output, target=None))
    (output / "keep").write_text("of an earlier export")
    export(make_plan(source, output, target=None, replace=True))
    assert not (output / "keep").exists() and (output / "config.json").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(SlipstreamError, match="is no directory"):
        export(make_plan(source, file, target=None, replace=True))


def test_weights_that_are_not_numbers(source: Source, tmp_path: Path) -> None:
    weights = dict(source.weights)
    weights["norm.weight"] = torch.full((64,), torch.nan)
    checkpoint = write_checkpoint(source.target.parent / "tiny.toml", tmp_path / "run", source.config, weights)
    with pytest.raises(SlipstreamError, match="norm.weight holds 64 values that are not finite") as caught:
        export(make_plan(source, tmp_path / "out", checkpoint=checkpoint))
    assert caught.value.reason is Reason.CHECKPOINT_INVALID
    weights["norm.weight"] = torch.full((64,), 1e6)
    checkpoint = write_checkpoint(source.target.parent / "tiny.toml", tmp_path / "big", source.config, weights)
    with pytest.raises(SlipstreamError, match="as float16 are not those.*not finite"):
        export(make_plan(source, tmp_path / "out", checkpoint=checkpoint, dtype="float16"))


def test_a_checkpoint_of_a_newer_version(source: Source, tmp_path: Path) -> None:
    shutil.copytree(source.run, tmp_path / "run")
    checkpoint = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(SlipstreamError, match="format version is 99, this one reads"):
        export(make_plan(source, tmp_path / "out", checkpoint=checkpoint))


def test_another_target(source: Source, tmp_path: Path) -> None:
    write_target(tmp_path / "other", seed=9)
    target = TargetSpec(model=str(tmp_path / "other"), dtype="float32")
    with pytest.raises(SlipstreamError, match="is not the one that the drafter was trained for") as caught:
        export(make_plan(source, tmp_path / "out", target=target))
    assert caught.value.reason is Reason.TARGET_INCOMPATIBLE
    assert "--allow-other-target" not in caught.value.remedy, "an export has no such flag"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("step", ["11", "newest", "../x"])
def test_a_step_that_is_not_there(step: str, source: Source) -> None:
    with pytest.raises(SlipstreamError, match="expected one of: 12"):
        find_checkpoint(f"{source.run}@{step}")
    assert find_checkpoint(f"{source.run}@12") == source.checkpoint
    assert find_checkpoint(f"{source.run}@latest") == source.run


def test_flags_that_contradict(source: Source, tmp_path: Path) -> None:
    flags = ["--to", "vllm", "--output", str(tmp_path / "o"), "--without-self-test", "--target-model", "x"]
    assert main(["export", str(source.run), *flags]) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [({"format_version": 2}, "format version 2, expected at most 1"), ({"format": None}, "cannot be understood")],
)
def test_the_record_of_another_version(
    change: dict[str, Any], words: str, exports: dict[str, Path], source: Source, tmp_path: Path
) -> None:
    copy = shutil.copytree(exports["vllm"], tmp_path / "copy")
    record = json.loads((copy / "slipstream.json").read_text())
    (copy / "slipstream.json").write_text(json.dumps(record | change))
    with pytest.raises(SlipstreamError, match=words):
        read_first_weights(copy, source.config, trained_target(source, record["target_fingerprint"]))


def trained_target(source: Source, fingerprint: str) -> TrainedTarget:
    tables = safetensors.torch.load_file(source.target / "model.safetensors")
    return TrainedTarget(
        fingerprint,
        "float32",
        {"embed_tokens.weight": tables["model.embed_tokens.weight"], "lm_head.weight": tables["lm_head.weight"]},
    )


# ---- the first weights of a run


def fingerprint_of(directory: Path) -> str:
    fingerprint: str = json.loads((directory / "slipstream.json").read_text())["target_fingerprint"]
    return fingerprint


@pytest.mark.parametrize("name", [*NAMES, "checkpoint"])
def test_a_run_begins_with_it(name: str, exports: dict[str, Path], source: Source) -> None:
    directory = exports.get(name, source.checkpoint)
    target = trained_target(source, fingerprint_of(exports["vllm"]))
    weights = read_first_weights(directory, source.config, target)
    assert weights.keys() == source.weights.keys()
    assert all(torch.equal(weights[key], tensor) for key, tensor in source.weights.items())


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"hidden_size": 32}, Reason.TARGET_INCOMPATIBLE, "for another target: hidden_size 64 .expected 32."),
        ({"vocab_size": 400}, Reason.TARGET_INCOMPATIBLE, "vocab_size 392 .expected 400."),
        ({"target_layer_ids": (0, 2)}, Reason.SPEC_INVALID, r"target_layer_ids \[1, 2\] .expected \[0, 2\]."),
        ({"block_size": 8}, Reason.SPEC_INVALID, "block_size 4 .expected 8..*Set in .drafter.: block_size = 4"),
        (
            {"num_layers": 3, "layer_types": ("full_attention",) * 3},
            Reason.SPEC_INVALID,
            "num_layers 2",
        ),
        ({"mask_token_id": 3}, Reason.SPEC_INVALID, "mask_token_id 384 .expected 3."),
    ],
)
@pytest.mark.parametrize("name", ["vllm", "checkpoint"])
def test_another_drafter(
    name: str, changes: dict[str, Any], reason: Reason, words: str, exports: dict[str, Path], source: Source
) -> None:
    config = exportable_config(**changes)
    target = trained_target(source, fingerprint_of(exports["vllm"]))
    with pytest.raises(SlipstreamError) as caught:
        read_first_weights(exports.get(name, source.checkpoint), config, target)
    assert caught.value.reason is reason
    assert caught.match(words)


@pytest.mark.parametrize("name", ["sglang", "checkpoint"])
def test_a_target_of_the_same_sizes(name: str, exports: dict[str, Path], source: Source) -> None:
    with pytest.raises(SlipstreamError, match="another target: fingerprint .*expected ffff"):
        read_first_weights(exports.get(name, source.checkpoint), source.config, trained_target(source, "f" * 64))


def test_copies_of_the_targets_tables(exports: dict[str, Path], source: Source, tmp_path: Path) -> None:
    """vLLM's format may hold them; they must be the target's."""
    copy = shutil.copytree(exports["vllm"], tmp_path / "copy")
    (copy / "slipstream.json").unlink()
    target = trained_target(source, "f" * 64)
    tensors = safetensors.torch.load_file(copy / "model.safetensors") | {
        "embed_tokens.weight": target.tables["embed_tokens.weight"].bfloat16(),
        "lm_head.weight": target.tables["lm_head.weight"],
    }
    safetensors.torch.save_file(tensors, copy / "model.safetensors")
    assert read_first_weights(copy, source.config, target).keys() == source.weights.keys()
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 0.5
    safetensors.torch.save_file(tensors, copy / "model.safetensors")
    with pytest.raises(SlipstreamError, match="lm_head.weight of its own: it differs from the target's by up to 0.5"):
        read_first_weights(copy, source.config, target)


def test_a_file_that_was_changed_since(exports: dict[str, Path], source: Source, tmp_path: Path) -> None:
    copy = shutil.copytree(exports["sglang"], tmp_path / "copy")
    with (copy / "config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(SlipstreamError, match="config.json is not what was exported"):
        read_first_weights(copy, source.config, trained_target(source, fingerprint_of(copy)))


def test_a_low_accepted_length_is_said(
    exports: dict[str, Path], reader: TargetReader, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    weights = drawn_weights(source.config, seed=5)
    drafter = as_module(source.config, weights)
    with caplog.at_level(logging.WARNING), pytest.raises(SlipstreamError):
        run_self_test(reader, drafter, exports["sglang"], ("Why?",))
    with caplog.at_level(logging.WARNING):
        found = run_self_test(reader, as_module(source.config, source.weights), exports["sglang"], ("Why?",))
    assert ("accepted_length_is_low" in caplog.text) == (found.accepted_length < 1.1)
