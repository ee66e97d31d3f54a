"""Rotary positions (arXiv 2104.09864), pairing dimension i with i + d/2; angles, cosines and rotation in float32."""

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [S, head_dim/2], of positions int [S]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.to(torch.float32)[:, None] * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def rotate(states: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate states [S, H, head_dim] by their positions' tables; same dtype out."""
    cos, sin = tables[0][:, None], tables[1][:, None]
    first, second = states.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(states.dtype)
