"""⑪ The loss of a chunk in two kernels: for CUDA, where passes over the logits cost as much as the products.

A compiled `loss_of_chunk` reads and writes a chunk's logits several times, and with the target's distribution keeps a
float32 gradient beside them: 10 bytes a logit at once. Here logits are read twice and overwritten by their gradient: 2
bytes a logit, or 4 with the target's. For cross-entropy, KL and their mix; decision 0019.
"""

import torch
from torch import Tensor

from drafter_trainer.frozen_head import FrozenHead
from drafter_trainer.loss import ChunkInput, ChunkResult, LossConfig, final_weights
from slipstream.run_spec.spec import CROSS_ENTROPY

FUSED_LOSS = False
"""Whether runs use it where it serves. Not before a GPU has measured it."""
_SERVED = {CROSS_ENTROPY, "kl"}


def why_not_fused(config: LossConfig, head: FrozenHead) -> str | None:
    """What keeps a run from it, in words; None where nothing does."""
    if not FUSED_LOSS:
        return "it is switched off: no GPU has measured it yet"
    if not isinstance(head, Tensor):
        return "the head is in FP8"
    if config.logit_soft_cap is not None:
        return "the target caps its logits"
    if others := sorted(config.objective.keys() - _SERVED):
        return f"the objective has {', '.join(others)}"
    return None


def fused_loss_of_chunk(chunk: ChunkInput, head: FrozenHead, config: LossConfig) -> ChunkResult:
    """As `loss.loss_of_chunk`; to be called as it is, not compiled. No host sync, and fit to be recorded."""
    # Here, because Triton is there on machines with a GPU only.
    from drafter_trainer.loss_kernel import STATISTICS, Rows, row_statistics, weigh_rows

    assert isinstance(head, Tensor), why_not_fused(config, head)
    labels = chunk.labels.flatten()
    logits = chunk.hidden.flatten(0, 1) @ head.t()
    target = None if chunk.target is None else chunk.target.flatten(0, 1) @ head.t()
    own = logits.gather(1, labels[:, None])[:, 0].float()
    rows = Rows(logits, target, labels, logits.new_empty(len(labels), STATISTICS, dtype=torch.float32))
    guesses = torch.empty_like(labels, dtype=torch.int32)
    row_statistics(rows, guesses)
    top, _, total, _, _ = rows.statistics.unbind(dim=1)
    cross_entropy = total.log() - (own - top)
    weights = final_weights(cross_entropy.view_as(chunk.weights), chunk, config).flatten()
    shares = config.objective.get(CROSS_ENTROPY, 0.0), config.objective.get("kl", 0.0)
    divergences = torch.empty_like(cross_entropy)
    weigh_rows(rows, weights, divergences, shares)
    cost = shares[0] * cross_entropy + shares[1] * divergences
    return ChunkResult(
        numerator=(weights * cost).sum(),
        gradient=(logits @ head).view_as(chunk.hidden),
        correct=(guesses == labels).view_as(chunk.counted) & chunk.counted,
    )
