"""⑨ Where blocks start, and what their slots must predict.

Shapes: T pack tokens, A anchors, B block size.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class Anchors:
    """Block starts of one pack: `positions` int64 [A], ascending where `valid` bool [A]; 0 elsewhere."""

    positions: Tensor
    valid: Tensor

    def to(self, device: torch.device | str) -> "Anchors":
        """The same anchors on `device`; the copy does not block the host."""
        return Anchors(self.positions.to(device, non_blocking=True), self.valid.to(device, non_blocking=True))


class BlockTargets(NamedTuple):
    """What the drafter reads and must predict, slot by slot; every tensor is [A, B].

    `block_ids` int64: the token at the anchor in slot 0, MASK in all others. `block_positions` int64: positions within
    the document. `labels` int64: the token recorded at anchor + k (a valid vocabulary row everywhere). `counted` bool:
    slots that enter loss and accuracy; never slot 0, and a slot only if all slots before it (but 0) count.
    """

    block_ids: Tensor
    block_positions: Tensor
    labels: Tensor
    counted: Tensor


def draw_anchors(loss_mask: Tensor, document_ids: Tensor, num_anchors: int, seed: int, sequence_number: int) -> Anchors:
    """Draw A anchors of a pack uniformly without replacement, sorted, padded with invalid ones.

    A candidate is a supervised token whose successor is supervised and lies in the same document. The draw depends on
    nothing but its arguments: each candidate gets a key from Philox (a stable, counter-based generator) and the A
    smallest keys win, so that a redelivered pack trains alike on every machine.

    Args:
        loss_mask: uint8 [T], CPU.
        document_ids: int32 [T], CPU; -1 on padding.
        num_anchors: A.
        seed: `train.seed`.
        sequence_number: the pack's number in its stream.
    """
    supervised = (loss_mask.numpy() != 0) & (document_ids.numpy() >= 0)
    documents = document_ids.numpy()
    candidates = np.flatnonzero(supervised[:-1] & supervised[1:] & (documents[:-1] == documents[1:]))
    digest = hashlib.blake2b(f"anchors/{seed}/{sequence_number}".encode(), digest_size=16).digest()
    keys = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(len(candidates))
    chosen = candidates[_smallest(keys, num_anchors)]
    positions = torch.zeros(num_anchors, dtype=torch.int64)
    positions[: len(chosen)] = torch.from_numpy(chosen.astype(np.int64))
    return Anchors(positions, torch.arange(num_anchors) < len(chosen))


def _smallest(keys: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.int64]:
    """Where the `count` smallest keys are, ascending; of equal keys the earlier one is the smaller."""
    if len(keys) <= count:
        return np.arange(len(keys))
    # Not sorted: that takes twice as long as all the rest of the draw.
    threshold = np.partition(keys, count - 1)[count - 1]
    below, equal = np.flatnonzero(keys < threshold), np.flatnonzero(keys == threshold)
    return np.sort(np.concatenate((below, equal[: count - len(below)])))


def build_block_targets(
    pack: Mapping[str, Tensor], anchors: Anchors, *, block_size: int, mask_token_id: int
) -> BlockTargets:
    """Lay out the blocks of a pack. Runs on the device of its arguments, without a host sync.

    Args:
        pack: `input_ids` int [T], `loss_mask` uint8 [T], `document_ids` int [T], `position_ids` int [T].
        anchors: on the pack's device.
        block_size: B.
        mask_token_id: the vocabulary row that stands for a token to be predicted.
    """
    token_ids, documents = pack["input_ids"].long(), pack["document_ids"]
    slots = torch.arange(block_size, device=token_ids.device)
    rows = anchors.positions[:, None] + slots
    inside = rows.clamp(max=token_ids.numel() - 1)
    labels = token_ids[inside]
    predictable = (
        (rows == inside)
        & (documents[inside] == documents[anchors.positions][:, None])
        & (pack["loss_mask"][inside] != 0)
        & anchors.valid[:, None]
    )
    # Slot 0 is given, so it neither counts nor breaks the run of the slots after it.
    unbroken = (predictable | (slots == 0)).int().cumprod(dim=1).bool()
    return BlockTargets(
        block_ids=torch.where(slots == 0, labels, mask_token_id),
        block_positions=pack["position_ids"].long()[anchors.positions][:, None] + slots,
        labels=labels,
        counted=unbroken & predictable & (slots > 0),
    )
