"""Count what the target accepted, by way of decoding and by source of the prompts."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from drafter_trainer.evaluation.decode import Decoded
from drafter_trainer.evaluation.losslessness import Difference, first_difference
from drafter_trainer.evaluation.prompts import Prompt


@dataclass
class Tally:
    """Decodings of one source by one way of decoding."""

    prompts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    emitted: list[int] = field(default_factory=list)
    """Tokens per verification round, bonus included."""
    accepted_at: list[int] = field(default_factory=list)
    """Per drafted position, rounds in which it was accepted."""

    def add(self, decoded: Decoded) -> None:
        """Count one prompt. The token that the prefill gives belongs to no round and to no speed."""
        self.prompts += 1
        self.tokens += len(decoded.tokens) - 1
        self.seconds += decoded.decode_seconds
        self.emitted += decoded.emitted_per_round
        self.accepted_at = self.accepted_at or [0] * decoded.num_drafts
        for accepted in decoded.drafts_accepted:
            for position in range(accepted):
                self.accepted_at[position] += 1

    @property
    def rounds(self) -> int:
        """Verification rounds."""
        return len(self.emitted)

    @property
    def accepted_length(self) -> float:
        """Mean tokens per round, bonus included: 1.0 for plain decoding."""
        return statistics.fmean(self.emitted) if self.emitted else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the time of all rounds, prefill excluded."""
        return self.tokens / self.seconds if self.seconds else float("nan")

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of rounds in which the draft at position 1, 2, … was accepted."""
        return [count / self.rounds for count in self.accepted_at] if self.rounds else []


PLAIN = "plain"
Tallies = dict[str, dict[str, Tally]]
"""Way of decoding → source → tally."""


@dataclass
class Comparison:
    """What an evaluation found."""

    tallies: Tallies
    differences: dict[str, list[Difference]]
    """Drafter label → prompts whose output is not that of plain decoding."""

    @property
    def lossless(self) -> bool:
        """No difference but those within the stated gap."""
        return all(d.allowed for found in self.differences.values() for d in found)


def compare(
    decodings: Iterable[tuple[Prompt, Mapping[str, Decoded]]], labels: Sequence[str], gap_bound: float
) -> Comparison:
    """Tally decodings as they come.

    Args:
        decodings: every prompt with its decoding by PLAIN and by each label.
        labels: of the drafters.
        gap_bound: see `losslessness`; 0 in float32.
    """
    tallies: Tallies = {label: {} for label in (PLAIN, *labels)}
    differences: dict[str, list[Difference]] = {label: [] for label in labels}
    for prompt, by_label in decodings:
        for label in (PLAIN, *labels):
            tallies[label].setdefault(prompt.source, Tally()).add(by_label[label])
        for label in labels:
            difference = first_difference(prompt.id, by_label[PLAIN], by_label[label], gap_bound)
            differences[label] += [difference] if difference else []
    return Comparison(tallies, differences)
