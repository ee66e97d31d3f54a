"""⑪ The target's own hidden states at the slots, for objectives that compare distributions.

The target predicts token a + k at row a + k - 1 of the pack. Its distribution there is the softmax of the frozen head
after its final norm; only hidden states are kept here, the logits are made chunk by chunk in the loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from drafter_trainer.anchors import Anchors


@dataclass(frozen=True)
class TargetStates:
    """`states` [T, D]: after the final norm, in the compute dtype. `rows` int64 [A, S]: where each slot is predicted;
    some valid row for slots that do not count."""

    states: Tensor
    rows: Tensor

    def of_blocks(self, blocks: slice) -> Tensor:
        """[N, S, D] for the slots of some blocks."""
        return self.states[self.rows[blocks]]


def target_states(
    last_hidden_state: Tensor, anchors: Anchors, block_size: int, final_norm: tuple[Tensor, float], dtype: torch.dtype
) -> TargetStates:
    """Runs on the device of its arguments, without a host sync.

    Args:
        last_hidden_state: [T, D], before the final norm.
        anchors: of the pack, on its device.
        block_size: B; S = B - 1.
        final_norm: weight float32 [D], an offset included, and epsilon.
        dtype: of the result.
    """
    weight, epsilon = final_norm
    states = functional.rms_norm(last_hidden_state.float(), weight.shape, weight, epsilon).to(dtype)
    slots = torch.arange(block_size - 1, device=anchors.positions.device)
    rows = (anchors.positions[:, None] + slots).clamp(max=len(last_hidden_state) - 1)
    return TargetStates(states, rows)
