"""What the writer of slots says of hidden states on a GPU: finite or not, and nothing else."""

import math

import pytest
import torch

from target_server.slot_writer import _all_finite

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    states = [torch.randn(1024, 576, device=CUDA).to(dtype) for _ in range(5)]
    assert _all_finite(states).item() is True
    for layer, row, column in ((0, 0, 0), (2, 511, 300), (4, 1023, 575)):
        kept = states[layer][row, column].clone()
        states[layer][row, column] = value
        assert _all_finite(states).item() is False, (layer, row, column)
        states[layer][row, column] = kept
    assert _all_finite(states).item() is True


def test_the_largest_finite_numbers_are_finite() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        most = torch.full((2048, 64), torch.finfo(dtype).max, dtype=dtype, device=CUDA)
        assert _all_finite([most, -most]).item() is True, dtype
