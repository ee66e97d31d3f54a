"""An answer in pieces that say where each came from: the prefill, an accepted draft, or the target's own token."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drafter_trainer.evaluation.decode import Decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FIRST, DRAFT, BONUS = "first", "draft", "bonus"
UNFINISHED = "\ufffd"
"""How a tokenizer writes bytes that are not a whole character yet."""


def token_texts(tokenizer: "PreTrainedTokenizerFast", tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens is added by its last one."""
    texts, shown = [], ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text.endswith(UNFINISHED) and end < len(tokens):
            texts.append("")
        else:
            texts.append(text[len(shown) :])
            shown = text
    return texts


def kinds(decoded: Decoded) -> list[str]:
    """Of every token, where it came from."""
    found = [FIRST] if decoded.tokens else []
    for kept, accepted in zip(decoded.emitted_per_round, decoded.drafts_accepted, strict=True):
        found += [DRAFT] * min(kept, accepted) + [BONUS] * (kept - min(kept, accepted))
    return found


def pieces(decoded: Decoded) -> list[tuple[str, str]]:
    """(kind, text) of every token, for the report."""
    return list(zip(kinds(decoded), decoded.texts, strict=True))
