"""⑪ What the sums say about acceptance, under names that say what is counted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_trainer.loss import LossSums


@dataclass(frozen=True)
class StepSums:
    """`LossSums` of all packs of a step in one vector, so that one copy brings them to the host."""

    values: Tensor
    """float32 [4 + 2 S]: numerator, weight, matched prefix, blocks, correct per slot, counted per slot."""

    @classmethod
    def of(cls, sums: LossSums) -> "StepSums":
        """Detached."""
        scalars = torch.stack((sums.numerator.detach(), sums.weight, sums.matched_prefix, sums.blocks))
        return cls(torch.cat((scalars, sums.slot_correct, sums.slot_count)))

    def __add__(self, other: "StepSums") -> "StepSums":
        return StepSums(self.values + other.values)


@dataclass(frozen=True)
class AcceptanceMetrics:
    """A step's numbers for people. Averages over no block or no slot are 0."""

    loss: float
    weight: float
    blocks: int
    mean_matched_prefix: float
    """Leading slots per block that predict the recorded token, the bonus token not included."""
    slot_accuracy: tuple[float, ...]
    """Share of correct predictions among counted slots, slots 1 to B - 1."""

    @classmethod
    def of(cls, sums: StepSums) -> "AcceptanceMetrics":
        """Waits for the device once."""
        values = sums.values.tolist()
        numerator, weight, matched, blocks = values[:4]
        slots = (len(values) - 4) // 2
        correct, counted = values[4 : 4 + slots], values[4 + slots :]
        return cls(
            loss=_ratio(numerator, weight),
            weight=weight,
            blocks=round(blocks),
            mean_matched_prefix=_ratio(matched, blocks),
            slot_accuracy=tuple(_ratio(c, n) for c, n in zip(correct, counted, strict=True)),
        )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
