"""Rotary positions (arXiv 2104.09864), pairing dimension i with i + d/2; angles, cosines and rotation in float32.

Written without joining halves: what is made of element-wise operations alone, a compiled backward computes once more
instead of keeping it, and the rotated queries are as large as any activation.
"""

import torch
from torch import Tensor

RotaryTables = tuple[Tensor, Tensor]
"""What the first and what the second half of a head is multiplied with, for both halves of the result: (cos, sin) and
(-sin, cos), float32 [S, 1, 2, head_dim/2]."""


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> RotaryTables:
    """Of positions int [S]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.to(torch.float32)[:, None, None] * (1.0 / theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, sin), dim=2), torch.stack((-sin, cos), dim=2)


def rotate(states: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate states [S, H, head_dim] by their positions' tables; same dtype out."""
    first, second = states.float()[:, :, None].chunk(2, dim=-1)
    return (first * tables[0] + second * tables[1]).flatten(2).to(states.dtype)
