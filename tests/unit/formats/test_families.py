"""The self-test on targets of other families: scaled embeddings, capped logits, experts, tied tables, windows."""

import dataclasses
from pathlib import Path

import pytest

from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.formats.drafter_format import Verifier
from drafter_trainer.formats.module import as_module
from drafter_trainer.formats.published import FORMATS, read_published
from drafter_trainer.formats.published_config import PublishedConfig
from drafter_trainer.formats.self_test import TargetReader, run_self_test
from slipstream.errors import SlipstreamError
from slipstream.eval_prompts import end_ids
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_facts import read_target_facts
from slipstream.target_loading import load_causal_lm
from tests.fakes.exports import drawn_weights, exportable_config
from tests.fakes.tiny_models import Family, save_tiny_model
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_formats_decode_the_same(family: Family, dtype: str, tmp_path: Path) -> None:
    tokenizer = build_tiny_tokenizer(tmp_path / "target", "chatml", vocab_size=384)
    tied = family in ("qwen2", "gemma2", "gemma3")
    save_tiny_model(tmp_path / "target", family, vocab_size=len(tokenizer) + 8, tied=tied)
    loaded = load_causal_lm(TargetSpec(model=str(tmp_path / "target"), dtype=dtype), "cpu")  # type: ignore[arg-type]
    facts = read_target_facts(loaded.model, loaded.tokenizer).config
    # The last layer counts too: its output lies before the final norm, where transformers' last entry lies behind it.
    config: DrafterConfig = dataclasses.replace(
        exportable_config(target_layer_ids=(1, 3), mask_token_id=facts.vocab_size - 1),
        target_model_type=facts.model_type,
        vocab_size=facts.vocab_size,
        embedding_scale=facts.embedding_scale,
        logit_soft_cap=facts.logit_soft_cap,
        rms_norm_eps=facts.rms_norm_eps,
        rope_theta=facts.rope_theta,
        max_position_embeddings=facts.max_position_embeddings,
    )
    weights = drawn_weights(config)
    reader = TargetReader(loaded, facts.embedding_scale, end_ids(loaded))
    for name, form in FORMATS.items():
        directory = tmp_path / name
        directory.mkdir()
        form.write(directory, PublishedConfig.of(config), weights, Verifier("t", ()))
        assert read_published(directory).config.for_target(facts) == config
        found = run_self_test(reader, as_module(config, weights), directory, ("Why?",))
        assert found.equal_drafts >= 0.98 * found.drafts > 0


def test_for_another_target(tmp_path: Path) -> None:
    tokenizer = build_tiny_tokenizer(tmp_path, "chatml", vocab_size=384)
    save_tiny_model(tmp_path, "llama", vocab_size=len(tokenizer) + 8, num_layers=2)
    loaded = load_causal_lm(TargetSpec(model=str(tmp_path), dtype="float32"), "cpu")
    facts = read_target_facts(loaded.model, loaded.tokenizer).config
    config = PublishedConfig.of(exportable_config(vocab_size=400))
    words = r"vocabulary rows 400 \(expected \d+\), target layers 4 \(expected 2\), target layer 2 \(expected 0 to 1\)"
    with pytest.raises(SlipstreamError, match=words):
        config.for_target(facts)
