"""A checkpoint or an export that is not what it says, or belongs to another target: named with found and expected."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafter_trainer.evaluation.target_check import check_fits
from drafter_trainer.formats.export import export
from drafter_trainer.formats.importing import open_with_target
from drafter_trainer.formats.opening import open_drafter
from drafter_trainer.formats.published import read_published
from drafter_trainer.formats.published_config import PublishedConfig
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.wire.target_config import TargetConfig
from tests.fakes.exports import drawn_weights, exportable_config, write_checkpoint
from tests.fakes.tiny_run import write_target
from tests.unit.formats.conftest import Source, make_plan

Weights = dict[str, Tensor]

TARGET = TargetConfig(
    model_type="llama",
    num_layers=4,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=392,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    embedding_scale=1.0,
    logit_soft_cap=None,
    norm_weight_offset=0.0,
    tokenizer_length=384,
    mask_token_id=None,
    special_tokens={},
)


def without_fc(weights: Weights) -> None:
    del weights["fc.weight"]


def with_another(weights: Weights) -> None:
    weights["layers.2.mlp.up_proj.weight"] = torch.zeros(96, 64)


def misshapen(weights: Weights) -> None:
    weights["norm.weight"] = torch.ones(65)


def not_finite(weights: Weights) -> None:
    weights["norm.weight"] = torch.full((64,), float("nan"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_fc, r"1 tensors are missing \(fc.weight\)"),
        (with_another, r"1 tensors are not known \(layers.2.mlp.up_proj.weight\)"),
        (misshapen, r"norm.weight is \[65\], expected \[64\]"),
        (not_finite, "norm.weight holds 64 values that are not finite"),
    ],
)
def test_weights_of_a_checkpoint_that_is_evaluated(
    damage: Callable[[Weights], None], words: str, source: Source, tmp_path: Path
) -> None:
    config = exportable_config()
    weights = drawn_weights(config)
    damage(weights)
    checkpoint = write_checkpoint(source.run.parent / "tiny.toml", tmp_path / "run", config, weights)
    with pytest.raises(SlipstreamError, match=words) as caught:
        open_drafter(checkpoint)
    assert caught.value.reason is Reason.CHECKPOINT_INVALID and str(checkpoint) in caught.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 400}, r"vocabulary rows 392 \(expected 400\)"),
        ({"hidden_size": 96}, r"hidden size 64 \(expected 96\)"),
        ({"num_target_layers": 6}, r"layers 4 \(expected 6\)"),
        ({"target_model_type": "qwen3"}, r"model type llama \(expected qwen3\)"),
        ({"target_layer_ids": (1, 9)}, r"target layer 9 \(expected 0 to 3\)"),
        ({"mask_token_id": 5000}, r"mask token 5000 \(expected 0 to 391\)"),
    ],
)
def test_a_drafter_for_another_target(changes: dict[str, object], words: str) -> None:
    config = exportable_config(**changes)
    with pytest.raises(SlipstreamError, match=words) as caught:
        check_fits(config, TARGET)
    assert caught.value.reason is Reason.TARGET_INCOMPATIBLE
    if "target_model_type" not in changes:
        with pytest.raises(SlipstreamError, match="belongs to another target"):
            PublishedConfig.of(config).for_target(TARGET)


def test_an_export_is_imported_for_a_target_of_the_same_sizes(source: Source, tmp_path: Path) -> None:
    export(make_plan(source, tmp_path / "exported", target=None))
    write_target(tmp_path / "other", seed=9)
    other = TargetSpec(model=str(tmp_path / "other"), dtype="float32")
    with pytest.raises(SlipstreamError, match="another target: fingerprint .{16}, expected") as caught:
        open_with_target(tmp_path / "exported", other, "cpu")
    assert caught.value.reason is Reason.TARGET_INCOMPATIBLE and "slipstream.json" in caught.value.remedy


def test_a_checkpoint_of_a_newer_version_is_not_called_damaged(source: Source, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000012"
    shutil.copytree(source.checkpoint, checkpoint)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(SlipstreamError, match="newer Slipstream: its format version is 99, this one reads") as caught:
        open_drafter(checkpoint)
    assert "Update Slipstream" in caught.value.remedy


def test_a_directory_without_weights(source: Source, tmp_path: Path) -> None:
    export(make_plan(source, tmp_path / "exported", target=None))
    (tmp_path / "exported" / "model.safetensors").unlink()
    (tmp_path / "exported" / "slipstream.json").unlink()
    with pytest.raises(SlipstreamError, match=r"expected model.safetensors or .*, found README.md, config.json"):
        read_published(tmp_path / "exported")


def test_a_training_checkpoint_of_specforge(tmp_path: Path) -> None:
    (tmp_path / "training_state.pt").write_bytes(b"")
    with pytest.raises(SlipstreamError, match="a training checkpoint of SpecForge .* expected config.json") as caught:
        read_published(tmp_path)
    assert "specforge export --to hf" in caught.value.remedy
