"""The Triton kernel that rounds a matrix to FP8 in both layouts: one read, two writes, tile by tile."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_EDGE = 128
_WARPS = 8
# What a kernel reads beside its arguments must be a constant of Triton's.
_TILE = tl.constexpr(_EDGE)
_LARGEST = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)


def round_tiles(matrix: Tensor, scale: Tensor, values: Tensor, transposed: Tensor) -> None:
    """Fill `values` [R, C] and `transposed` [C, R] with matrix / scale; all contiguous, on the current CUDA device."""
    rows, columns = matrix.shape
    grid = (triton.cdiv(columns, _EDGE), triton.cdiv(rows, _EDGE))
    _round_tile[grid](matrix, scale, values, transposed, rows, columns, num_warps=_WARPS)


@triton.jit
def _round_tile(matrix, scale, values, transposed, rows, columns):  # type: ignore[no-untyped-def]
    column = tl.program_id(0).to(tl.int64) * _TILE + tl.arange(0, _TILE)
    row = tl.program_id(1).to(tl.int64) * _TILE + tl.arange(0, _TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    quotient = tl.load(matrix + at, mask=inside, other=0.0).to(tl.float32) / tl.load(scale)
    # Comparisons with NaN are false, so that it passes; minimum and maximum might drop it.
    quotient = tl.where(quotient > _LARGEST, _LARGEST, quotient)
    quotient = tl.where(quotient < -_LARGEST, -_LARGEST, quotient)
    rounded = quotient.to(tl.float8e4nv)
    tl.store(values + at, rounded, mask=inside)
    tl.store(transposed + column[:, None] * rows + row[None, :], tl.trans(rounded), mask=tl.trans(inside))
