"""Small, real tokenizers made on the spot, with chat templates in the styles of known model families.

`chatml` (Qwen, SmolLM2) and `llama3` are byte-level BPE; `gemma` is SentencePiece-like BPE: spaces become a visible
mark, unknown characters fall back to bytes. Every style covers every Unicode text. Building takes some milliseconds.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

Style = Literal["chatml", "llama3", "gemma"]
STYLES: tuple[Style, ...] = get_args(Style)

_TRAINING_LINES = (
    "Which city is the capital of the country, and why was it chosen over the larger harbour town?",
    "The answer is that the river could be crossed there, so the roads met and the market grew.",
    "Write a function that returns the sum of the squares of the even numbers in a list.",
    "def sum_of_squares(values):\n    return sum(value * value for value in values if value % 2 == 0)",
    "Explain in two sentences how a plant turns light, water and air into sugar and oxygen.",
    "If a train leaves at 9:15 and needs 2 hours and 50 minutes, it arrives at 12:05.",
    "user assistant system model You are a helpful assistant. Hello! Thank you, and good morning.",
)

_CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_LLAMA3_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

_GEMMA_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "<start_of_turn>{{ role }}\n{{ message['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@dataclass(frozen=True)
class _Family:
    """What makes a style: its special tokens (in id order), which of them begin and end a text, its template."""

    specials: tuple[str, ...]
    bos: str | None
    eos: str
    template: str


_FAMILIES: dict[str, _Family] = {
    "chatml": _Family(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), None, "<|im_end|>", _CHATML_TEMPLATE),
    "llama3": _Family(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
        _LLAMA3_TEMPLATE,
    ),
    "gemma": _Family(
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", _GEMMA_TEMPLATE
    ),
}


def build_tiny_tokenizer(
    directory: Path | str, style: Style = "chatml", *, vocab_size: int = 512
) -> PreTrainedTokenizerFast:
    """Build a tokenizer of `style`, save it with its chat template into `directory`, and return it.

    `vocab_size` is an upper bound of `len(tokenizer)`; at least 280 (bytes and special tokens) for a useful one.
    The files are what `AutoTokenizer.from_pretrained(directory)` reads. The same arguments give the same tokenizer.
    """
    family = _FAMILIES[style]
    backend = _sentencepiece_like(family, vocab_size) if style == "gemma" else _byte_level(family, vocab_size)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos,
        eos_token=family.eos,
        unk_token="<unk>" if style == "gemma" else None,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = family.template
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def _byte_level(family: _Family, vocab_size: int) -> Tokenizer:
    """Byte-level BPE as GPT-2 and its successors: every text is covered by the 256 byte symbols."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(family.specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_TRAINING_LINES, trainer)
    return backend


def _sentencepiece_like(family: _Family, vocab_size: int) -> Tokenizer:
    """BPE over characters with spaces as U+2581 and byte fallback, as in Gemma's tokenizer."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    space_mark = normalizers.Replace(" ", "\u2581")
    learner = Tokenizer(BPE())
    learner.normalizer = space_mark
    learner.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581"), "merged_with_next")
    room = max(1, vocab_size - len(family.specials) - len(byte_tokens))
    learner.train_from_iterator(_TRAINING_LINES, BpeTrainer(vocab_size=room, show_progress=False))

    vocab = {token: index for index, token in enumerate([*family.specials, *byte_tokens])}
    for token, _ in sorted(learner.get_vocab().items(), key=lambda entry: entry[1]):
        vocab.setdefault(token, len(vocab))
    merges = [(left, right) for left, right in _learned_merges(learner) if left + right in vocab]
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = space_mark
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.specials])
    return backend


def _learned_merges(learner: Tokenizer) -> list[tuple[str, str]]:
    """The merges of a trained BPE model, in rank order; its JSON is their only public form."""
    return [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]]
