"""How much each slot of a block counts in the loss: uniform, decaying, or D-PACE.

Shapes: N blocks, S = B - 1 predicted slots; slot k of the paper is column k - 1 here.
"""

import torch
from torch import Tensor

_GAMMA_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}


def default_decay_gamma(block_size: int) -> float:
    """The decay constant DFlash uses (arXiv 2602.06036): 7 for B = 16, 5 for 10, 4 for 8; B / 2 elsewhere."""
    return _GAMMA_BY_BLOCK_SIZE.get(block_size, block_size / 2)


def decay_weights(block_size: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """exp(-(k - 1) / gamma) for k = 1 ... B - 1, float32 [S]; made on `device`, nothing is copied there."""
    return torch.exp(torch.arange(block_size - 1, dtype=torch.float32, device=device) / -gamma)


def dpace_weights(cross_entropy: Tensor, counted: Tensor, alpha: float) -> Tensor:
    """D-PACE (arXiv 2605.18810): the expected number of tokens from slot k on that a slot's success unlocks.

    With p = exp(-CE) and s = (1 - alpha) p + alpha, the weight of slot k is the sum over j >= k of s_1 ... s_j.
    Slots that do not count have s = 1, add nothing and weigh nothing. No gradient flows through the weights.

    Args:
        cross_entropy: float32 [N, S].
        counted: bool [N, S].
        alpha: smoothing; 1 makes every counted slot's factor 1.

    Returns:
        float32 [N, S].
    """
    factor = (1.0 - alpha) * torch.exp(-cross_entropy.detach()) + alpha
    reach = torch.where(counted, factor, 1.0).cumprod(dim=1) * counted
    # A suffix sum without a flip of the result's strides in between: total minus the prefix before k.
    return (reach.sum(dim=1, keepdim=True) - reach.cumsum(dim=1) + reach) * counted
