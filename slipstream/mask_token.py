"""Which row of the target's vocabulary stands for a token to be predicted, or in words why none can. Torch-free.

The trainer asks with what the target server says of the loaded model. Who plans or creates a run asks before, with what
the target's files say, where they are at hand and say it surely.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import SlipstreamError
from slipstream.gguf_header import read_gguf_header
from slipstream.packaged_model import packaged_copy
from slipstream.run_spec.architectures import DFLASH
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DrafterSpec, RunSpec
from slipstream.target_files import TargetFiles, files_at_hand

_MOST_BYTES = 1 << 27
_SHOWN = 8
_GGUF_TOKENS = "tokenizer.ggml.tokens"


class MaskFacts(Protocol):
    """What a mask depends on."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""

    @property
    def tokenizer_length(self) -> int:
        """Rows from here on are unused."""

    @property
    def mask_token_id(self) -> int | None:
        """The tokenizer's own mask token."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Rows of the added tokens by text."""


@dataclass(frozen=True)
class MaskFactsOfFiles:
    """As files say them."""

    vocab_size: int
    tokenizer_length: int
    special_tokens: Mapping[str, int]
    mask_token_id: int | None = None


def mask_row(spec: DrafterSpec, target: MaskFacts) -> int:
    """The vocabulary row for MASK: explicit id, the tokenizer's own mask token, an unused row, the named token.

    Raises:
        SlipstreamError: SPEC_INVALID, the id is outside the vocabulary, the named token does not exist, or none of the
            four gives a row.
    """
    named = None if spec.mask_token is None else target.special_tokens.get(spec.mask_token)
    known = ", ".join(sorted(target.special_tokens)[:_SHOWN]) or "none"
    if spec.mask_token is not None and named is None:
        raise _no_mask(
            f"drafter.mask_token is {spec.mask_token!r}, which is no special token of the target (it has: {known})",
            "Name one of its special tokens that no answer contains.",
        )
    unused = target.tokenizer_length if target.tokenizer_length < target.vocab_size else None
    rows = (spec.mask_token_id, target.mask_token_id, unused, named)
    row = next((row for row in rows if row is not None), None)
    if row is None:
        raise _no_mask(
            f"the target has no mask token and no unused row (tokenizer {target.tokenizer_length} tokens, vocabulary "
            f"{target.vocab_size} rows), and the recipe names no mask token.",
            "Set drafter.mask_token to a special token that no answer contains "
            + (f"(it has: {known})." if target.special_tokens else "(`slipstream data inspect RECIPE` lists some)."),
        )
    if row >= target.vocab_size:
        raise _no_mask(
            f"the mask is row {row}, the target's vocabulary has {target.vocab_size} rows",
            "Set drafter.mask_token_id to a row inside the vocabulary.",
        )
    return row


def require_mask(spec: RunSpec) -> None:
    """Refuse a run that would find no mask, in the trainer's words; whatever files do not say surely is left to it.

    Raises:
        SlipstreamError: SPEC_INVALID, as `mask_row` does.
    """
    if spec.drafter.architecture != DFLASH:
        return  # an architecture that a package brings may find its mask in another way
    packaged = packaged_copy(spec.target)
    target = spec.target if packaged is None else spec.target.model_copy(update={"model": packaged})
    try:
        files = files_at_hand(target)
        facts = None if files is None else mask_facts(files)
    except (SlipstreamError, OSError, RuntimeError):
        # Also what may not be read here, a name too long for a file, a home directory that nobody has: whoever loads
        # the model says what is wrong with it.
        return
    if facts is None or (spec.drafter.mask_token is not None and not facts.special_tokens):
        return
    mask_row(spec.drafter, facts)


def mask_facts(files: TargetFiles) -> MaskFactsOfFiles | None:
    """What a target's files say of its mask; None where they leave it open, or speak of a mask token of its own.

    Without special tokens: a GGUF file does not say which of its tokens they are.

    Raises:
        SlipstreamError: MODEL_INVALID, a GGUF file that is none.
    """
    if files.is_gguf:
        return _of_gguf(files.weights[0])
    tokenizer, settings = _json(files.root / "tokenizer.json"), _json(files.root / "tokenizer_config.json")
    rows = vocabulary_rows(files.root)
    vocabulary = _member(tokenizer, "model", "vocab")
    if rows is None or not isinstance(vocabulary, dict | list):
        return None
    # Of Unigram, pairs of a token and its score.
    listed = vocabulary if isinstance(vocabulary, dict) else [pair[0] for pair in vocabulary if _is_pair(pair)]
    tokens = set(listed)
    added = [*_entries(tokenizer.get("added_tokens")), *_decoder_entries(settings)]
    special = {content: row for row, content in added}
    tokens |= special.keys()
    named = [settings, _json(files.root / "special_tokens_map.json")]
    if any(one.get("mask_token") for one in named) or _speaks_of_a_mask(tokens):
        return None
    if any(text not in tokens for one in named for text in _named_tokens(one)):
        return None  # transformers adds it when it loads the tokenizer
    return MaskFactsOfFiles(rows, len(tokens), special)


def vocabulary_rows(model_directory: Path) -> int | None:
    """Rows of the vocabulary by config.json, which may be more than the tokenizer has tokens; None where none says."""
    config = _json(model_directory / "config.json")
    inner = config.get("text_config")
    rows = (inner if isinstance(inner, Mapping) else config).get("vocab_size")
    return rows if isinstance(rows, int) else None


def _of_gguf(path: Path) -> MaskFactsOfFiles | None:
    header = read_gguf_header(path, texts=(_GGUF_TOKENS,))
    tokens = header.values.get(_GGUF_TOKENS)
    embedding = header.shapes.get("token_embd.weight", ())
    if not isinstance(tokens, list) or len(embedding) != 2:
        return None
    if "tokenizer.ggml.mask_token_id" in header.values or _speaks_of_a_mask(set(tokens)):
        return None
    return MaskFactsOfFiles(embedding[1], len(tokens), {})


def _speaks_of_a_mask(tokens: set[str]) -> bool:
    """Whether a tokenizer may have a mask token that its files do not name as such: some families' code does."""
    return any(f"{begin}{word}{end}" in tokens for begin, end in ("[]", "<>") for word in ("MASK", "mask"))


def _is_pair(entry: object) -> bool:
    return isinstance(entry, list) and bool(entry) and isinstance(entry[0], str)


def _entries(added: Any) -> list[tuple[int, str]]:
    """Rows and texts of `added_tokens`."""
    listed = [one for one in added if isinstance(one, Mapping)] if isinstance(added, list) else []
    pairs = [(one.get("id"), one.get("content")) for one in listed]
    return [(row, content) for row, content in pairs if isinstance(row, int) and isinstance(content, str)]


def _decoder_entries(settings: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The same of `added_tokens_decoder`, by row."""
    decoder = settings.get("added_tokens_decoder")
    pairs = decoder.items() if isinstance(decoder, Mapping) else ()
    return _entries([{**token, "id": int(row)} for row, token in pairs if row.isdecimal() and isinstance(token, dict)])


def _named_tokens(settings: Mapping[str, Any]) -> Iterator[str]:
    """Texts of the special tokens that settings name: one, several, or several by a name of their own."""
    for key, value in settings.items():
        if key.endswith(("_token", "special_tokens")):
            yield from _texts(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(value["content"] if "content" in value else list(value.values()))
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def _member(table: Mapping[str, Any], *keys: str) -> Any:
    found: Any = table
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _json(path: Path) -> Mapping[str, Any]:
    """An object; an empty one where there is none."""
    try:
        found = json.loads(path.read_bytes()) if path.stat().st_size <= _MOST_BYTES else None
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _no_mask(message: str, remedy: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.SPEC_INVALID, remedy=remedy)
