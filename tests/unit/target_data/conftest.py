"""Tiny tokenizers, one per template style, built once per test process."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.fakes.tiny_tokenizer import build_tiny_tokenizer

STYLES = ("chatml", "llama3", "gemma")


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerFast]:
    root: Path = tmp_path_factory.mktemp("tokenizers")
    return {style: build_tiny_tokenizer(root / style, style) for style in STYLES}


@pytest.fixture
def chatml(tmp_path: Path) -> PreTrainedTokenizerFast:
    """A fresh one, whose template a test may replace."""
    return build_tiny_tokenizer(tmp_path / "tokenizer", "chatml")
