"""A real vLLM serves our exports and drafts what we draft. VLLM_PYTHON names the Python of an environment with vLLM."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drafter_trainer.drafter import DFlashDrafter
from drafter_trainer.drafter_config import FULL, SLIDING, DFlashConfig
from drafter_trainer.evaluation.decode import BlockDrafter, CachedTarget, decode_greedily
from drafter_trainer.formats.drafter_format import Verifier
from drafter_trainer.formats.published import FORMATS
from drafter_trainer.formats.published_config import PublishedConfig
from drafter_trainer.formats.self_test import our_hidden
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_loading import LoadedTarget, decoder_layers, load_causal_lm
from tests.fakes.exports import exportable_config
from tests.fakes.tiny_models import save_tiny_model
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer

PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed, and VLLM_PYTHON names no Python that has it"),
    pytest.mark.timeout(600),
]
# One layer: vLLM 0.32 on a CPU normalises the context's keys of every draft layer with the first one's weights.
# Heads of 32, the smallest that its CPU attention takes.
CONFIG = exportable_config(hidden_size=128, head_dim=32, num_layers=1, layer_types=(FULL,))
WINDOW = 12
TOKENS = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoadedTarget]:
    directory = tmp_path_factory.mktemp("target")
    tokenizer = build_tiny_tokenizer(directory, "chatml", vocab_size=384)
    save_tiny_model(directory, vocab_size=len(tokenizer) + 8, hidden_size=CONFIG.hidden_size)
    return directory, load_causal_lm(TargetSpec(model=str(directory), dtype="float32"), "cpu")


def prompts() -> list[list[int]]:
    """Two shorter and two longer than the window."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 380, (length,), generator=generator).tolist() for length in (4, 9, 20, 33)]


def tables(target: LoadedTarget) -> tuple[Tensor, Tensor]:
    model = target.model
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


def drafter_that_learned(target: LoadedTarget, config: DFlashConfig) -> DFlashDrafter:
    """The greedy answers, by heart: drafts are accepted, so that what follows an accepted draft is compared as well."""
    torch.manual_seed(0)
    drafter, (embedding, head) = DFlashDrafter(config), tables(target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    texts = []
    for prompt in prompts():
        cached = CachedTarget(target.model, decoder_layers(target.model), config.target_layer_ids)
        answer = decode_greedily(cached, None, torch.tensor(prompt), TOKENS, frozenset()).tokens
        cached.close()
        cached = CachedTarget(target.model, decoder_layers(target.model), config.target_layer_ids)
        with torch.no_grad():
            _, features = cached.forward(tokens := torch.tensor(prompt + answer))
        cached.close()
        texts.append((tokens, features, len(prompt)))
    block = torch.full((config.block_size,), config.mask_token_id)
    for step in range(480):
        tokens, features, length = texts[step % len(texts)]
        anchor = length + (7 * step) % (TOKENS - config.block_size)
        block[0] = tokens[anchor]
        logits = our_hidden(drafter, embedding[block], features[:anchor]) @ head.t()
        loss = functional.cross_entropy(logits, tokens[anchor + 1 : anchor + config.block_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


class Recorded(BlockDrafter):
    """Keeps its drafts."""

    def propose(self, last_token: int) -> Tensor:
        found = super().propose(last_token)
        self.drafts = [*getattr(self, "drafts", []), found.tolist()]
        return found


@pytest.mark.parametrize("format_name", ["vllm", "sglang", "zlab"])
@pytest.mark.parametrize("layer_type", [FULL, SLIDING])
def test_vllm_drafts_what_we_draft(
    target: tuple[Path, LoadedTarget], tmp_path: Path, layer_type: str, format_name: str
) -> None:
    """The nested files, and the flat ones that vLLM reads as well."""
    directory, loaded = target
    window = WINDOW if layer_type == SLIDING else None
    config = exportable_config(**(vars(CONFIG) | {"layer_types": (layer_type,), "sliding_window": window}))
    drafter, (embedding, head) = drafter_that_learned(loaded, config), tables(loaded)
    verifier = Verifier(str(directory), ("LlamaForCausalLM",))
    FORMATS[format_name].write(tmp_path, PublishedConfig.of(config), drafter.state_dict(), verifier)
    assert PYTHON is not None
    command = [PYTHON, str(Path(__file__).with_name("vllm_drafts.py")), str(directory), str(tmp_path), str(TOKENS)]
    done = subprocess.run(command, input=json.dumps(prompts()), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    rounds = tokens = 0
    for prompt, theirs in zip(prompts(), json.loads(done.stdout.splitlines()[-1]), strict=True):
        cached = CachedTarget(loaded.model, decoder_layers(loaded.model), config.target_layer_ids)
        ours = Recorded(drafter, embedding, head)
        answer = decode_greedily(cached, ours, torch.tensor(prompt), TOKENS, frozenset())
        cached.close()
        assert theirs["tokens"] == answer.tokens
        # It may draft once more than it verifies.
        assert theirs["drafts"][: len(ours.drafts)] == ours.drafts
        assert len(theirs["drafts"]) - len(ours.drafts) in (0, 1)
        rounds, tokens = rounds + len(ours.drafts), tokens + len(answer.tokens) - 1
    assert tokens > 1.5 * rounds, "too few drafts were accepted to show what follows them"
