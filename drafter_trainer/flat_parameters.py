"""Parameters of a module that lie behind one another in flat float32 buffers.

A small drafter is bound by launches, not by arithmetic: norm, clipping and update each touch one buffer instead of one
tensor per weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

# Every weight starts at a multiple of so many elements, so that views are aligned for any kernel and any dtype.
_ALIGNMENT = 64


@dataclass(frozen=True)
class FlatLayout:
    """Which parameter lies where."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    """In elements, from the beginning of the buffer."""
    size: int
    """Elements in all, gaps included."""

    @classmethod
    def of(cls, named: Sequence[tuple[str, nn.Parameter]]) -> "FlatLayout":
        """Parameters in this order."""
        offsets: list[int] = []
        size = 0
        for _, parameter in named:
            offsets.append(size)
            size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        names, shapes = tuple(name for name, _ in named), tuple(tuple(parameter.shape) for _, parameter in named)
        return cls(names, shapes, tuple(offsets), size)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Views of a flat buffer with the parameters' shapes."""
        flat = zip(self.offsets, self.shapes, strict=True)
        return [buffer[offset : offset + _numel(shape)].view(shape) for offset, shape in flat]

    def by_name(self, buffer: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """The same views by `prefix` + name."""
        return {prefix + name: view for name, view in zip(self.names, self.views(buffer), strict=True)}


@dataclass(frozen=True)
class FlatSegment:
    """Parameters that are updated alike: where they lie in `master` and `gradient`, float32 [size] each."""

    layout: FlatLayout
    master: Tensor
    gradient: Tensor


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
