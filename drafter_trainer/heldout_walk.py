"""From matches at every token of an answer to what decoding would do: a walk from block to block.

Decoding starts a block at the last token it has, keeps the drafts that match and adds the target's own next token; the
next block starts there. Which tokens those are depends on the drafter, so it is matched at every token and then only
the visited ones count. An average over all tokens would be too high: blocks start more often where the last one failed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Round:
    """One verification round."""

    emitted: int
    """Matching drafts and the target's own token; what is left of the answer, at most."""
    matched: int
    room: int
    """Drafted tokens that lie inside the answer; what decoding would draft behind its end is not counted."""


def walk(matched: Sequence[int], block_size: int) -> list[Round]:
    """The rounds in which an answer would be decoded.

    Args:
        matched: for every token of the answer but the last, how many of the tokens behind it are drafted right in a row
            from there, block_size - 1 at most, none behind the answer's end.
        block_size: B.
    """
    rounds, position = [], 0
    while position < len(matched):
        left = len(matched) - position
        one = Round(min(matched[position] + 1, left), matched[position], min(block_size - 1, left))
        rounds.append(one)
        position += one.emitted
    return rounds


@dataclass(frozen=True)
class Acceptance:
    """What the rounds of some answers were worth."""

    answers: int
    rounds: int
    tokens: int
    """Emitted in these rounds."""
    accepted_length: float
    """Tokens a round, the bonus token included."""
    slot_acceptance: tuple[float, ...]
    """Share of the rounds whose draft in slot 1, 2, … was kept, among those where the slot lies inside the answer."""

    def to_json(self) -> dict[str, Any]:
        """For a metrics record."""
        return {
            "answers": self.answers,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "accepted_length": self.accepted_length,
            "slot_acceptance": list(self.slot_acceptance),
        }


def acceptance_of(walks: Iterable[Sequence[Round]], block_size: int) -> Acceptance:
    """Sums over walks with at least one round among them; every round weighs the same, as in `slipstream eval`."""
    by_answer = list(walks)
    rounds = [one for rounds in by_answer for one in rounds]
    tokens = sum(one.emitted for one in rounds)
    slots = []
    for slot in range(1, block_size):
        inside = [one for one in rounds if one.room >= slot]
        slots.append(sum(one.matched >= slot for one in inside) / len(inside) if inside else 0.0)
    return Acceptance(len(by_answer), len(rounds), tokens, tokens / len(rounds), tuple(slots))
