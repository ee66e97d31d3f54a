"""How many drafted tokens in a row each block gets right: the head's choices, without a loss and without gradients.

Shapes: N blocks, S predicted slots, D hidden size, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from drafter_trainer.anchors import BlockTargets
from drafter_trainer.frozen_head import FrozenHead, logits_of
from drafter_trainer.loss import LossConfig, block_chunks

ChunkMatches = Callable[[Tensor, Tensor, Tensor, FrozenHead], Tensor]


def matches_of_chunk(hidden: Tensor, labels: Tensor, counted: Tensor, head: FrozenHead) -> Tensor:
    """Leading slots whose most likely token is the recorded one: fixed shapes, fit to be compiled as it stands.

    A soft cap is left out: it does not change which logit is the largest.

    Args:
        hidden: [N, S, D].
        labels: int64 [N, S].
        counted: bool [N, S].
        head: [V, D].

    Returns:
        int64 [N].
    """
    choices = logits_of(hidden.flatten(0, 1), head).argmax(dim=-1).view_as(labels)
    return ((choices == labels) & counted).long().cumprod(dim=1).sum(dim=1)


def matches_of_counted_rows(hidden: Tensor, labels: Tensor, counted: Tensor, head: FrozenHead) -> Tensor:
    """The same, with counted rows alone going through the head: less work, but shapes that vary, so on CPU only."""
    rows = counted.flatten().nonzero()[:, 0]
    choices = labels.new_full((labels.numel(),), -1)
    choices[rows] = logits_of(hidden.flatten(0, 1)[rows], head).argmax(dim=-1)
    return ((choices.view_as(labels) == labels) & counted).long().cumprod(dim=1).sum(dim=1)


@torch.no_grad()
def matched_slots(
    hidden: Tensor, head: FrozenHead, targets: BlockTargets, config: LossConfig, chunk_matches: ChunkMatches | None
) -> Tensor:
    """Of every block of a pack, int64 [A]; chunk by chunk, as the loss: `[A·B, V]` never exists.

    Args:
        hidden: [A·B, D], the drafter's output.
        head: frozen.
        targets: [A, B] each.
        config: of the loss, for the chunks.
        chunk_matches: a compiled `matches_of_chunk`; default: eager, by `config.only_counted_rows`.
    """
    if chunk_matches is None:
        chunk_matches = matches_of_counted_rows if config.only_counted_rows else matches_of_chunk
    blocks = hidden.view(*targets.labels.shape, -1)
    matched = torch.zeros_like(targets.labels[:, 0])
    for start, _, end in block_chunks(len(blocks), config):
        part = slice(start, end)
        matched[part] = chunk_matches(blocks[part, 1:], targets.labels[part, 1:], targets.counted[part, 1:], head)
    return matched
