"""What a run needs, made on the spot: a tiny target with tokenizer, conversations, a recipe that trains in seconds."""

import json
import random
from pathlib import Path
from typing import Any

from tests.fakes.tiny_models import save_tiny_model
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer

_WORDS = (
    "the",
    "river",
    "town",
    "market",
    "road",
    "bread",
    "light",
    "water",
    "even",
    "number",
    "list",
    "answer",
    "why",
)

RECIPE = """
name = "tiny"
[target]
model = "./target"
dtype = "float32"
[data]
files = ["conversations.jsonl"]
pack_tokens = 128
window_documents = 16
[drafter]
num_layers = 1
num_features = 2
target_layer_ids = [1, 2]
block_size = 4
[train]
device = "cpu"
attention = "sdpa"
precision = "float32"
anchors_per_pack = 16
packs_per_step = 1
max_steps = 24
[optimizer]
learning_rate = 3e-3
[checkpoint]
every_steps = 5
keep = 2
"""


def write_target(directory: Path, *, seed: int = 0) -> None:
    """A random llama model (hidden size 64, four layers) with a ChatML tokenizer and unused vocabulary rows."""
    tokenizer = build_tiny_tokenizer(directory, "chatml", vocab_size=384)
    save_tiny_model(directory, "llama", vocab_size=len(tokenizer) + 8, seed=seed)


def write_conversations(path: Path, *, count: int = 120, seed: int = 0) -> None:
    """`count` conversations of one question and one answer, in OpenAI's layout."""
    words = random.Random(seed)

    def text(shortest: int, longest: int) -> str:
        return " ".join(words.choices(_WORDS, k=words.randint(shortest, longest)))

    with path.open("w") as file:
        for number in range(count):
            turns: list[dict[str, Any]] = [
                {"role": "user", "content": text(3, 8) + "?"},
                {"role": "assistant", "content": text(8, 24) + "."},
            ]
            file.write(json.dumps({"id": f"c{number}", "messages": turns}) + "\n")


def write_tiny_run(directory: Path, *, target_seed: int = 0) -> Path:
    """Target, conversations and recipe in `directory`; returns the recipe's path."""
    directory.mkdir(parents=True, exist_ok=True)
    write_target(directory / "target", seed=target_seed)
    write_conversations(directory / "conversations.jsonl")
    recipe = directory / "tiny.toml"
    recipe.write_text(RECIPE)
    return recipe
