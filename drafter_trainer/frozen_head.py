"""The two products with the target's frozen head: in the drafter's precision, or in FP8."""

from torch import Tensor

from drafter_trainer.fp8 import Fp8Head

FrozenHead = Tensor | Fp8Head
"""[V, D]; a tensor is in the dtype of the hidden states."""


def logits_of(hidden: Tensor, head: FrozenHead) -> Tensor:
    """hidden [R, D] → float32 [R, V]."""
    product = hidden @ head.t() if isinstance(head, Tensor) else head.logits(hidden)
    return product.float()


def gradient_by_hidden(by_logits: Tensor, head: FrozenHead, like: Tensor, largest: Tensor | None = None) -> Tensor:
    """Gradient of the hidden states, [R, D] in the dtype of `like`.

    Args:
        by_logits: float32 [R, V].
        head: see `FrozenHead`.
        like: the hidden states.
        largest: float32 [R, 1], a bound of every row's entries and near the largest, where the caller has one at hand.
    """
    if isinstance(head, Tensor):
        return by_logits.to(like.dtype) @ head
    if largest is None:
        largest = by_logits.abs().amax(dim=-1, keepdim=True)
    return head.gradient(by_logits, largest).to(like.dtype)
