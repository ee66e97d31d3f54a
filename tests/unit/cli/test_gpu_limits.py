"""What is said of GPUs of every class, and which sizes are refused there."""

import pytest

from slipstream.gpu_limits import class_of, gpu_limits

SMALL, H200_MEMORY, A100_MEMORY = 101_376, 232_448, 166_912
TORCH = (2, 11)


@pytest.mark.parametrize(
    ("capability", "shared_memory", "name", "refused", "accepted"),
    [
        ((7, 0), 98_304, "Volta", (64, 128), ()),
        ((7, 5), 65_536, "Turing", (64, 128), ()),
        ((8, 0), A100_MEMORY, "Ampere, data centre", (8,), (16, 64, 128, 256)),
        ((8, 6), SMALL, "Ampere", (8,), (64, 128, 256)),
        ((8, 9), SMALL, "Ada", (8,), (64, 128, 256)),
        ((9, 0), H200_MEMORY, "Hopper", (8,), (64, 80, 128, 256)),
        ((9, 0), None, "Hopper", (8,), (64, 128, 256)),
        ((10, 0), H200_MEMORY, "Blackwell, data centre", (8,), (64, 128, 256)),
        ((10, 3), H200_MEMORY, "Blackwell, data centre", (8,), (64, 128, 256)),
        ((12, 0), SMALL, "Blackwell, GeForce and workstation", (8, 192, 256), (16, 64, 128)),
        ((12, 1), SMALL, "Blackwell, GeForce and workstation", (8, 192, 256), (64, 128)),
        ((13, 0), None, "unknown architecture", (8,), (128, 256)),
    ],
)
def test_classes(
    capability: tuple[int, int],
    shared_memory: int | None,
    name: str,
    refused: tuple[int, ...],
    accepted: tuple[int, ...],
) -> None:
    limits = gpu_limits(capability, shared_memory, TORCH)
    assert class_of(capability) == name and name in limits.words[0]
    assert all(limits.head_dim_refusal(size) for size in refused)
    assert not any(limits.head_dim_refusal(size) for size in accepted)
    assert (limits.refusal is not None) == (capability < (8, 0))


@pytest.mark.parametrize(
    ("capability", "shared_memory", "words"),
    [
        ((7, 5), 65_536, "no bfloat16; it begins with 8.0: no flex_attention, so no training"),
        ((8, 0), A100_MEMORY, "head_dim: no limit is known up to 256"),
        ((8, 0), A100_MEMORY, "FP8 products: none, from 8.9 on"),
        ((8, 9), SMALL, "larger heads probably do not fit 99 KiB"),
        ((8, 9), SMALL, "FP8 products (train.fp8): in hardware"),
        ((12, 0), SMALL, "head_dim: 128 at most; the backward of larger heads does not fit shared memory"),
    ],
)
def test_words(capability: tuple[int, int], shared_memory: int, words: str) -> None:
    assert any(words in line for line in gpu_limits(capability, shared_memory, TORCH).words)


def test_a_refused_size_is_named_with_the_limit() -> None:
    assert gpu_limits((12, 0), SMALL, TORCH).head_dim_refusal(256) == (
        "head_dim 256 is larger than 128, the most that flex_attention's backward fits into this card's shared memory"
    )
    assert "begins with 8.0" in (gpu_limits((7, 5), None, None).head_dim_refusal(64) or "")


def test_what_the_release_of_torch_changes() -> None:
    assert any("per process" in line for line in gpu_limits((9, 0), H200_MEMORY, (2, 13)).words)
    assert not any("per process" in line for line in gpu_limits((9, 0), H200_MEMORY, (2, 14)).words)
