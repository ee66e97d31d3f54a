"""What an architecture implements: training, decoding and checkpoints know nothing else of it (docs/drafters.md).

Shapes: T context tokens, A anchors, B block size, R = A·B block rows, D hidden size, n features. While decoding: N
rows, L tokens a row, S tokens that a row can hold.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from drafter_trainer.block_mask import AttentionLayout, BlockAttention
from drafter_trainer.drafter_config import DrafterConfig
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_FIRST_ROOM = 256


class DraftContext:
    """What a drafter keeps, while it decodes, of the tokens before a block."""

    def extend(self, features: Tensor, positions: Tensor) -> None:
        """Take features [N, L, n·D] of tokens at positions int [N, L], of the rows' documents.

        A position may come again: rejected drafts are replaced by the tokens that take their place.
        """
        raise NotImplementedError

    def hidden(self, embeddings: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [N, B, D] for the target's head.

        Of one block a row: embeddings [N, B, D], as the target embeds the last token, then MASK; positions int [N, B].
        What was taken at the block's own positions or behind them counts as absent.
        """
        raise NotImplementedError


class Drafter(nn.Module):
    """The trained weights: matrices and vectors. Embedding and head are the target's and are not part of it.

    A new run's matrices are drawn from normal(0, 0.02), vectors are one, and `norm.weight`, if there is such a vector,
    is the target's final norm. Matrices get weight decay, and Muon where the recipe asks for it; vectors never do.
    """

    config: DrafterConfig

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        features: Tensor,
        block_embeddings: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        attention: BlockAttention,
    ) -> Tensor:
        """Final hidden states of every block row of a pack, ready for the target's head: [R, D].

        On CUDA it is compiled as one graph of fixed shapes: tensor code that never waits for the device. Rows of
        invalid anchors hold finite values that mean nothing. A block may depend on nothing but its own rows and context
        tokens of its document before its anchor.

        Args:
            features: [T, n·D], target layers concatenated in ascending order.
            block_embeddings: [R, D], as the target embeds the token at the anchor, then MASK; its scale included.
            context_positions: int [T], within the document.
            block_positions: int [R], anchor + slot, within the document.
            attention: from block rows to what each sees; `attention.anchors.positions` are the anchors' rows in the
                pack, int64 [A].
        """
        raise NotImplementedError

    def fixed_context(self, max_length: int) -> DraftContext:
        """An empty context for any number of rows of at most so many tokens (S).

        Its shapes and addresses stay what they are after a first `extend`: rounds are captured as CUDA graphs.
        """
        raise NotImplementedError

    def growing_context(self) -> DraftContext:
        """An empty context for one row of any length. This one is made of fixed ones, each twice as large."""
        return _DoublingContext(self)

    def attention_layout(self, kind: Literal["flex", "sdpa"]) -> AttentionLayout:
        """The masks that `forward` needs; this one: none."""
        return AttentionLayout(kind, self.config.block_size, has_full=False)

    def recompute_layers(self, count: int) -> None:
        """From now on keep, of the first `count` layers, what enters them alone, and compute them once more in the
        backward.

        Raises:
            SlipstreamError: SPEC_INVALID, the architecture cannot.
        """
        raise SlipstreamError(
            f"train.activation_checkpointing asks for {count} layers to be computed again, which "
            f"{self.config.architecture} does not do.",
            reason=Reason.SPEC_INVALID,
            remedy="Set train.activation_checkpointing = false.",
        )


class _DoublingContext(DraftContext):
    """Keeps the features, and takes them anew into a larger context when one is full."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._room = _FIRST_ROOM
        self._context = drafter.fixed_context(self._room)
        self._features: Tensor | None = None

    def extend(self, features: Tensor, positions: Tensor) -> None:
        start, end = int(positions[0, 0]), int(positions[0, -1]) + 1
        before = features[:, :0] if self._features is None else self._features[:, :start]
        self._features = torch.cat((before, features), dim=1)
        # A block comes behind the tokens, and a context may hold it too.
        if end + self._drafter.config.block_size > self._room:
            while end + self._drafter.config.block_size > self._room:
                self._room *= 2
            self._context = self._drafter.fixed_context(self._room)
            features, positions = self._features, torch.arange(end, device=positions.device)[None]
        self._context.extend(features, positions)

    def hidden(self, embeddings: Tensor, positions: Tensor) -> Tensor:
        return self._context.hidden(embeddings, positions)
