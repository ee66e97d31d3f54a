"""A GGUF file as far as a plan reads it: its header."""

import struct


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf_without_weights(*, tied: bool, vocabulary: int = 49_152, tokens: tuple[str, ...] = ("a", "bc")) -> bytes:
    """A file as llama.cpp writes it, without weights."""
    numbers = {
        "llama.block_count": 30,
        "llama.embedding_length": 576,
        "llama.feed_forward_length": 1536,
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
    }
    pairs = [_text("general.architecture") + struct.pack("<I", 8) + _text("llama")]
    pairs += [_text(key) + struct.pack("<II", 4, value) for key, value in numbers.items()]
    texts = b"".join(map(_text, tokens))
    pairs += [_text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, len(tokens)) + texts]
    pairs += [_text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<ff", 0.5, 1.5)]
    pairs += [_text("general.flag") + struct.pack("<I?", 7, True)]
    names = ["token_embd.weight"] + ([] if tied else ["output.weight"])
    tensors = [_text(name) + struct.pack("<IQQIQ", 2, 576, vocabulary, 0, 0) for name in names]
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join((*pairs, *tensors))
