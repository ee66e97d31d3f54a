"""A tiny target with its tokenizer, loaded as evaluation loads it."""

from pathlib import Path

import pytest

from slipstream.run_spec.spec import TargetSpec
from slipstream.target_loading import LoadedTarget, load_causal_lm
from tests.fakes.tiny_models import save_tiny_model
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    directory: Path = tmp_path_factory.mktemp("target")
    tokenizer = build_tiny_tokenizer(directory, style="chatml")
    save_tiny_model(directory, "llama", vocab_size=len(tokenizer), seed=3)
    return load_causal_lm(TargetSpec(model=str(directory), dtype="float32"), "cpu")
