"""The packs of a run's steps: which of the stream, in which shapes, and as a step gets them on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from drafter_trainer.anchors import Anchors
from drafter_trainer.pack_buckets import declared_lengths


@dataclass(frozen=True)
class PackPlan:
    """What the run wants from its stream."""

    first_sequence_number: int
    packs_per_step: int
    total_steps: int
    tensor_shapes: Mapping[str, tuple[int, ...]]
    """Every tensor a step reads, with its shape in the longest bucket: other packs never reach the device."""
    num_anchors: int
    seed: int
    """`train.seed`, for the anchors."""
    prefetch_packs: int
    """Packs held ready while a step runs; at least one whole step."""
    lease_seconds: float
    shorter_lengths: tuple[int, ...] = ()
    """Buckets besides the longest one, which `tensor_shapes` describes."""

    @property
    def pack_lengths(self) -> tuple[int, ...]:
        """All buckets, in tokens, ascending."""
        return declared_lengths((*self.shorter_lengths, self.tensor_shapes["input_ids"][0]))

    def shapes_of(self, pack_tokens: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what a step reads of a pack of so many tokens."""
        return {name: (pack_tokens, *shape[1:]) for name, shape in self.tensor_shapes.items()}

    def sequence_numbers(self, step: int) -> range:
        """The packs of a step."""
        first = self.first_sequence_number + step * self.packs_per_step
        return range(first, first + self.packs_per_step)

    @property
    def end(self) -> int:
        """One past the last pack of the run."""
        return self.sequence_numbers(self.total_steps).start

    def step_of(self, sequence_number: int) -> int:
        """The step of a pack."""
        return (sequence_number - self.first_sequence_number) // self.packs_per_step


@dataclass(frozen=True)
class TrainingPack:
    """One pack on the trainer's device: tensors by their names in the payload, and its anchors."""

    sequence_number: int
    tensors: Mapping[str, Tensor]
    anchors: Anchors


@dataclass(frozen=True)
class StepBatch:
    """Exactly the packs of one step, in order; without those that are quarantined."""

    step: int
    packs: tuple[TrainingPack, ...]


def payload_shapes(hidden_states: Sequence[str], pack_tokens: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a step reads of a pack."""
    rows = dict.fromkeys(("input_ids", "loss_mask", "document_ids", "position_ids"), (pack_tokens,))
    return {**rows, **dict.fromkeys(hidden_states, (pack_tokens, hidden_size))}
