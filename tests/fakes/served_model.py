"""A directory with everything a target server needs: a tiny model, its tokenizer, and conversations."""

import json
import random
from pathlib import Path

from slipstream.run_spec.load import canonical_json
from slipstream.run_spec.spec import DataSpec
from tests.fakes.tiny_models import save_tiny_model
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer

LAYERS = (0, 2)
HIDDEN_SIZE = 64
PACK_TOKENS = 128


def write_tiny_target(directory: Path, *, num_layers: int = 4, hidden_size: int = HIDDEN_SIZE) -> Path:
    """A tiny Llama in float32 with a chat template; returns the directory."""
    tokenizer = build_tiny_tokenizer(directory)
    save_tiny_model(directory, vocab_size=len(tokenizer), num_layers=num_layers, hidden_size=hidden_size)
    return directory


def write_conversations(path: Path, count: int = 60, seed: int = 0) -> Path:
    """Conversations of one turn with answers of different lengths; returns the path."""
    rng = random.Random(seed)
    words = ["the", "river", "crossed", "a", "market", "where", "old", "roads", "met", "and", "new", "harbours", "grew"]
    with path.open("w", encoding="utf-8") as file:
        for index in range(count):
            question, answer = (" ".join(rng.choices(words, k=rng.randint(2, 8))) for _ in range(2))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"c{index}", "messages": messages}) + "\n")
    return path


def data_spec_json(conversations: Path, *, seed: int = 0, pack_tokens: int = PACK_TOKENS) -> str:
    """What a trainer sends for these conversations."""
    return canonical_json(DataSpec(files=(str(conversations),), seed=seed, pack_tokens=pack_tokens))
