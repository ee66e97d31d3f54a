"""What the target's benchmark runs on: model shapes with random weights, and documents as long as real ones."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PACK_TOKENS = 8192
BATCH_DOCUMENTS = 8
WINDOW_DOCUMENTS = 512

_HISTOGRAM = Path(__file__).parent / "document_lengths.json"
_LLAMA = {"model_type": "llama", "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}


@dataclass(frozen=True)
class Shape:
    """A target."""

    title: str
    config: dict[str, Any]
    """transformers' configuration."""
    layer_ids: tuple[int, ...]
    """Captured: those that DFlash takes for five draft layers. Later layers do not run."""
    serve_packs: int
    """Packs that the server's benchmark counts."""

    @property
    def skipped_packs(self) -> int:
        """Packs before those, so many that the forward has been recorded for most shapes of packs: a training run
        meets that once in many thousand packs, and the forward alone is measured without it too."""
        return 5 + self.serve_packs // 8


SHAPES = {
    "qwen3-8b": Shape(
        "Qwen3-8B shape",
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 40960, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        },
        (1, 9, 17, 25, 33),
        serve_packs=24,
    ),
    "qwen3-1.7b": Shape(
        "Qwen3-1.7B shape",
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 40960, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        },
        (1, 7, 13, 19, 25),
        serve_packs=100,
    ),
    "smollm2-135m": Shape(
        "SmolLM2-135M shape",
        _LLAMA
        | {
            "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3,
        },
        (1, 8, 14, 20, 27),
        serve_packs=300,
    ),
    "small": Shape(
        "small",
        _LLAMA
        | {
            "vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        (0, 2),
        serve_packs=10,
    ),
    "tiny": Shape(
        "tiny",
        _LLAMA
        | {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        (0, 2),
        serve_packs=10,
    ),
}  # fmt: skip


def document_lengths(count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Lengths `[count]` drawn from the histogram of real conversations, every one at least 1."""
    histogram = json.loads(_HISTOGRAM.read_text(encoding="utf-8"))
    documents, width = np.array(histogram["documents"]), histogram["bin_tokens"]
    rng = np.random.default_rng(seed)
    bins = rng.choice(len(documents), size=count, p=documents / documents.sum())
    return np.maximum(bins * width + rng.integers(0, width, count), 1)


def real_batches(count: int) -> list[list[int]]:
    """Lengths of batches of eight documents in random order: what padding makes of real data."""
    lengths = document_lengths(count * BATCH_DOCUMENTS, seed=1)
    return lengths.reshape(count, BATCH_DOCUMENTS).tolist()


def real_packs(count: int) -> list[list[int]]:
    """Document lengths of `count` packs, packed as a stream packs them; the emptiest are not among them."""
    from target_server.packing import best_fit_decreasing

    sizes = document_lengths(WINDOW_DOCUMENTS, seed=2).tolist()
    packs = best_fit_decreasing(range(len(sizes)), sizes, PACK_TOKENS)
    return [[sizes[index] for index in members] for members in packs[: min(count, len(packs) - 1)]]
