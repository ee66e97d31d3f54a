"""A captured round on CUDA says what the same round says uncaptured, greedy and sampled."""

from pathlib import Path

import pytest
import torch

from drafter_trainer.evaluation.batch_decoder import BatchDecoder, DecodingSetting
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_loading import LoadedTarget, load_causal_lm
from tests.fakes.tiny_models import Family, save_tiny_model
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer
from tests.unit.evaluation.test_decode import NO_END, random_drafter

PROMPTS = (torch.arange(5, 17), torch.arange(3, 9))


def load(directory: Path, family: Family, dtype: str) -> LoadedTarget:
    tokenizer = build_tiny_tokenizer(directory, style="chatml")
    save_tiny_model(directory, family, vocab_size=len(tokenizer), seed=3)
    return load_causal_lm(TargetSpec(model=str(directory), dtype=dtype), "cuda")  # type: ignore[arg-type]


def decode(
    target: LoadedTarget, *, drafts: bool, graphs: bool, temperature: float = 0.0, compiler: str | None = None
) -> list[list[int]]:
    drafter = random_drafter(target).to(target.model.device, target.model.dtype) if drafts else None
    setting = DecodingSetting(rows=2, max_length=256, temperature=temperature, seed=5, graphs=graphs, compiler=compiler)
    decoder = BatchDecoder(target.model, drafter, setting)
    prompts = [prompt.cuda() for prompt in PROMPTS]
    decoder.decode(prompts, 8, NO_END)
    if decoder.noise is not None:
        decoder.generator.manual_seed(5)
    return [result.tokens for result in decoder.decode(prompts, 40, NO_END)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3"])
def test_float32_is_lossless_with_graphs(family: Family, tmp_path: Path) -> None:
    target = load(tmp_path, family, "float32")
    plain = decode(target, drafts=False, graphs=False)
    assert decode(target, drafts=False, graphs=True) == plain
    assert decode(target, drafts=True, graphs=True) == plain
    assert decode(target, drafts=True, graphs=False) == plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafts", [False, True])
def test_bfloat16_replays_what_it_runs(tmp_path: Path, drafts: bool, temperature: float) -> None:
    target = load(tmp_path, "llama", "bfloat16")
    eager, replayed = (
        decode(target, drafts=drafts, graphs=graphs, temperature=temperature) for graphs in (False, True)
    )
    assert replayed == eager


def test_float32_is_lossless_compiled(tmp_path: Path) -> None:
    target = load(tmp_path, "llama", "float32")
    plain = decode(target, drafts=False, graphs=False)
    assert decode(target, drafts=False, graphs=True, compiler="inductor") == plain
    assert decode(target, drafts=True, graphs=True, compiler="inductor") == plain
