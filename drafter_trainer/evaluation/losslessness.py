"""Is speculative output that of plain greedy decoding? Token for token in float32; within a stated gap otherwise.

In reduced precision, verifying a block and decoding one by one round differently, so that near-ties may fall
either way: every difference is reported with the gap of the target's two largest logits there, and only a gap above the
bound is an error.
"""

from dataclasses import asdict, dataclass
from typing import Any

from drafter_trainer.evaluation.decode import Decoded


@dataclass(frozen=True)
class Difference:
    """The first position at which a prompt's two outputs differ; what follows it has another history."""

    prompt: str
    position: int
    plain_token: int | None
    """None: the plain output had ended."""
    speculative_token: int | None
    top_two_gap: float
    """The larger of the two decodings' top-two gaps at the position; infinite where one had ended."""
    allowed: bool

    def to_dict(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self)


def first_difference(prompt: str, plain: Decoded, speculative: Decoded, gap_bound: float) -> Difference | None:
    """Compare two decodings of one prompt; None when they are equal token for token.

    Args:
        prompt: its id.
        plain: without a drafter.
        speculative: with one.
        gap_bound: in logits; 0 allows nothing (float32).
    """
    if plain.tokens == speculative.tokens:
        return None
    shared = min(len(plain.tokens), len(speculative.tokens))
    position = next((i for i in range(shared) if plain.tokens[i] != speculative.tokens[i]), shared)
    gap = float("inf") if position == shared else max(plain.gaps[position], speculative.gaps[position])
    return Difference(
        prompt=prompt,
        position=position,
        plain_token=plain.tokens[position] if position < len(plain.tokens) else None,
        speculative_token=speculative.tokens[position] if position < len(speculative.tokens) else None,
        top_two_gap=gap,
        allowed=gap_bound > 0 and gap <= gap_bound,
    )
