"""A target of a named shape with drawn weights, as files that a target server loads; and documents for it.

    python -m benchmarks.random_target tiny DIR        writes DIR/target and DIR/documents.jsonl

What a benchmark of speed measures does not depend on the weights, and nothing has to be downloaded.
"""

import argparse
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.target_workload import SHAPES, Shape, real_packs

FIRST_DOCUMENT_TOKEN = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    # The parent starts its children with signals held.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    shape = SHAPES[args.shape]
    write_target(shape, args.directory / "target", args.device)
    write_documents(shape, args.directory / "documents.jsonl")
    return 0


def random_model(shape: Shape, device: str) -> Any:
    """A causal language model of the shape, weights drawn on the device, in bfloat16 (on a CPU in float32)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(shape.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, pad_token_id=None, bos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device != "cpu" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def write_target(shape: Shape, directory: Path, device: str) -> Path:
    """Model and tokenizer of the shape; returns the directory."""
    build_tokenizer(shape.config["vocab_size"], directory)
    random_model(shape, device).save_pretrained(directory)
    return directory


def build_tokenizer(vocab_size: int, directory: Path) -> Any:
    """A tokenizer with one word per id, for data that is token ids already; saved into the directory."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0", eos_token="w1"
    )
    tokenizer.chat_template = "{{ messages }}"  # a target without one is refused
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def write_documents(shape: Shape, path: Path) -> Path:
    """Documents of real lengths as random token ids, all but the first token trained; returns the path.

    Of one token each they would have equal hidden states in all rows, which a GPU multiplies faster than those of text.
    """
    draw = random.Random(0)
    ids = range(FIRST_DOCUMENT_TOKEN, shape.config["vocab_size"])
    with path.open("w", encoding="utf-8") as file:
        for index, length in enumerate(length for pack in real_packs(10**6) for length in pack):
            tokens = draw.choices(ids, k=max(length, 2))
            mask = [0] + [1] * (len(tokens) - 1)
            file.write(json.dumps({"id": f"d{index}", "input_ids": tokens, "loss_mask": mask}) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
