"""Count what the target accepted, by setting, way of decoding and source of the prompts."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from drafter_trainer.evaluation.decode import Decoded
from drafter_trainer.evaluation.losslessness import Difference, first_difference
from drafter_trainer.evaluation.setting import PLAIN, Setting
from slipstream.eval_prompts import Prompt


@dataclass(frozen=True)
class PromptCount:
    """One decoding; what the prefill gave is not counted."""

    tokens: int
    rounds: int
    seconds: float


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
    by_prompt: list[PromptCount] = field(default_factory=list)
    """In the order in which they came, the same for every way of decoding."""

    def add(self, decoded: Decoded) -> None:
        """Count one prompt. The token that the prefill gives belongs to no round and to no speed."""
        self.prompts += 1
        self.tokens += len(decoded.tokens) - 1
        self.seconds += decoded.decode_seconds
        self.emitted += decoded.emitted_per_round
        self.by_prompt.append(
            PromptCount(len(decoded.tokens) - 1, len(decoded.emitted_per_round), decoded.decode_seconds)
        )
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


Tallies = dict[str, dict[str, Tally]]
"""Way of decoding → source → tally."""


SAMPLES_PER_SOURCE = 2
"""Decodings that are kept to be shown."""


@dataclass
class Comparison:
    """What an evaluation found under one setting.

    Args:
        labels: of the drafters.
        gap_bound: see `losslessness`; 0 in float32.
        greedy: outputs are compared token for token; samples are not.
    """

    labels: Sequence[str]
    gap_bound: float
    greedy: bool = True
    tallies: Tallies = field(init=False)
    differences: dict[str, list[Difference]] = field(init=False)
    """Drafter label → prompts whose output is not that of plain decoding."""
    samples: dict[str, list[tuple[Prompt, Decoded]]] = field(init=False)
    """Drafter label → the first decodings of every source."""

    def __post_init__(self) -> None:
        self.tallies = {label: {} for label in (PLAIN, *self.labels)}
        self.differences = {label: [] for label in self.labels}
        self.samples = {label: [] for label in self.labels}

    @property
    def lossless(self) -> bool:
        """No difference but those within the stated gap."""
        return all(d.allowed for found in self.differences.values() for d in found)

    def add(self, prompt: Prompt, by_label: Mapping[str, Decoded]) -> None:
        """Count a prompt's decodings by PLAIN and by each label."""
        for label in (PLAIN, *self.labels):
            tally = self.tallies[label].setdefault(prompt.source, Tally())
            tally.add(by_label[label])
            if label != PLAIN and tally.prompts <= SAMPLES_PER_SOURCE:
                self.samples[label].append((prompt, by_label[label]))
        for label in self.labels if self.greedy else ():
            difference = first_difference(prompt.id, by_label[PLAIN], by_label[label], self.gap_bound)
            self.differences[label] += [difference] if difference else []


def compare(
    decodings: Iterable[tuple[Setting, Prompt, Mapping[str, Decoded]]], labels: Sequence[str], gap_bound: float
) -> dict[Setting, Comparison]:
    """Tally decodings as they come, by setting in the order in which those come.

    Args:
        decodings: every prompt with its decoding by PLAIN and by each label.
        labels: of the drafters.
        gap_bound: see `losslessness`; 0 in float32.
    """
    comparisons: dict[Setting, Comparison] = {}
    for setting, prompt, by_label in decodings:
        if setting not in comparisons:
            comparisons[setting] = Comparison(labels, gap_bound, setting.greedy)
        comparisons[setting].add(prompt, by_label)
    return comparisons
