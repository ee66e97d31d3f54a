"""What a GPU can and cannot do for a trainer, from three facts: compute capability, shared memory, torch. Torch-free.

Pure data, for `slipstream doctor` and for the trainer, which refuses in the same words.
"""

from dataclasses import dataclass

Capability = tuple[int, int]

LEAST_CAPABILITY: Capability = (8, 0)
"""The first with bfloat16 in its tensor cores, which flex_attention's kernels are tuned for."""
SMALLEST_HEAD_DIM = 16
"""Edge of a tensor core's tile."""
FIRST_WITH_FP8: Capability = (8, 9)
"""Ada and Hopper: the first tensor cores with FP8."""
_SMALL_SHARED_MEMORY = 101_376
"""Of a block, in bytes: GeForce and workstation cards of compute capability 8.6, 8.9 and 12.0."""
_SMALL_HEAD_DIM = 128

_CLASSES = {
    (7, 0): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere, data centre",
    (8, 6): "Ampere",
    (8, 7): "Orin",
    (8, 9): "Ada",
    (9, 0): "Hopper",
}
_CLASSES_BY_MAJOR = {10: "Blackwell, data centre", 11: "Thor", 12: "Blackwell, GeForce and workstation"}


@dataclass(frozen=True)
class GpuLimits:
    """`refusal`: why no trainer runs there at all. `largest_head_dim`: None where no limit is known. `words`: what is
    worth knowing, one fact each."""

    refusal: str | None
    largest_head_dim: int | None
    words: tuple[str, ...]

    def head_dim_refusal(self, head_dim: int) -> str | None:
        """Why a drafter with heads of this size cannot be trained there; None if nothing is known against it."""
        if self.refusal is not None:
            return self.refusal
        if head_dim < SMALLEST_HEAD_DIM:
            return f"head_dim {head_dim} is smaller than {SMALLEST_HEAD_DIM}, the least that flex_attention computes"
        if self.largest_head_dim is not None and head_dim > self.largest_head_dim:
            return (
                f"head_dim {head_dim} is larger than {self.largest_head_dim}, the most that flex_attention's backward "
                "fits into this card's shared memory"
            )
        return None


def class_of(capability: Capability) -> str:
    """The architecture in words."""
    return _CLASSES.get(capability) or _CLASSES_BY_MAJOR.get(capability[0], "unknown architecture")


def gpu_limits(capability: Capability, shared_memory: int | None, release: tuple[int, int] | None) -> GpuLimits:
    """Limits of one card.

    Args:
        capability: compute capability.
        shared_memory: most bytes that a block can opt in to; None where torch does not tell.
        release: of torch; None where there is none that can be used.
    """
    dotted = f"{capability[0]}.{capability[1]}"
    if capability < LEAST_CAPABILITY:
        why = f"compute capability {dotted} ({class_of(capability)}) has no bfloat16; it begins with 8.0"
        return GpuLimits(why, None, (f"{why}: no flex_attention, so no training",))
    words = [f"compute capability {dotted} ({class_of(capability)}): bfloat16 and compiled flex_attention"]
    largest = None
    if capability[0] == 12:
        # pytorch/pytorch#198224: every default tile of the backward needs more than 101,376 bytes above 128.
        largest = _SMALL_HEAD_DIM
        words.append(f"head_dim: {_SMALL_HEAD_DIM} at most; the backward of larger heads does not fit shared memory")
    elif shared_memory is not None and shared_memory <= _SMALL_SHARED_MEMORY:
        words.append(
            f"head_dim: {_SMALL_HEAD_DIM} works; larger heads probably do not fit {shared_memory >> 10} KiB of shared "
            "memory per block (not tried; the trainer's warm-up would say so)"
        )
    else:
        words.append("head_dim: no limit is known up to 256")
    words.append(
        "FP8 products (train.fp8): in hardware" if capability >= FIRST_WITH_FP8 else "FP8 products: none, from 8.9 on"
    )
    if release is not None and release < (2, 14):
        words.append("one thread alone runs compiled code: this torch guards its compiler's state per process")
    return GpuLimits(None, largest, tuple(words))
