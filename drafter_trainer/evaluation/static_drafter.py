"""A drafter over a context of fixed size, for several rows at once: from the last accepted tokens to logits.

Shapes: N rows, B block size, L tokens, D hidden size, n features, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional

from drafter_trainer.drafter_interface import Drafter


class StaticDrafter:
    """A drafter with its context.

    Args:
        drafter: evaluation mode, on the target's device and in its dtype.
        embedding: the target's embedding weight [V, D].
        head: the target's head weight [V, D].
        max_length: tokens that a row can hold.
    """

    def __init__(self, drafter: Drafter, embedding: Tensor, head: Tensor, max_length: int) -> None:
        self.drafter, self.embedding, self.head = drafter, embedding, head
        self.context = drafter.fixed_context(max_length)
        self._slots = torch.arange(drafter.config.block_size, device=head.device)

    @property
    def block_size(self) -> int:
        """Tokens that a round verifies (B)."""
        return self.drafter.config.block_size

    def extend(self, features: Tensor, positions: Tensor) -> None:
        """Put features [N, L, n·D] of tokens at positions int [N, L] into the context."""
        self.context.extend(features, positions)

    def propose(self, last: Tensor, positions: Tensor) -> Tensor:
        """Logits [N, B - 1, V] of the tokens behind the last accepted one.

        Args:
            last: int [N].
            positions: int [N, B], of the last token and the drafts.
        """
        config = self.drafter.config
        block = torch.where(self._slots == 0, last[:, None], config.mask_token_id)
        embedded = functional.embedding(block, self.embedding) * config.embedding_scale
        hidden = self.context.hidden(embedded, positions)
        logits = functional.linear(hidden[:, 1:], self.head)
        cap = config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)
