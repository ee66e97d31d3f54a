"""What a round keeps of its drafts: the matching prefix, or by speculative sampling (arXiv 2211.17192).

Everything stays on the device and has a fixed shape.

Shapes: N rows, B - 1 drafts a row (0 in plain decoding), V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """Of one round."""

    tokens: Tensor
    """int64 [N, B]: drafts that are kept, then the target's own token; what follows means nothing."""
    matched: Tensor
    """int64 [N]: drafts that are kept."""


class Noise:
    """Random numbers of one round, drawn before it: a captured round reads them from where it was captured.

    Args:
        rows: N.
        drafts: B - 1.
        vocabulary: V.
        generator: on the device of the decoding.
    """

    def __init__(self, rows: int, drafts: int, vocabulary: int, generator: torch.Generator) -> None:
        device = generator.device
        self._generator = generator
        self.accept = torch.zeros(rows, drafts, device=device)
        """Uniform in [0, 1): a draft is kept where this is below p/q."""
        self.draft = torch.ones(rows, drafts, vocabulary, device=device)
        """Exponential, see `draw`."""
        self.own = torch.ones(rows, vocabulary, device=device)
        """Exponential, for the target's own token."""

    def refill(self) -> None:
        """Draw all of it anew."""
        self.own.exponential_(generator=self._generator)
        if self.accept.numel():
            self.accept.uniform_(generator=self._generator)
            self.draft.exponential_(generator=self._generator)


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """float32 softmax of logits [..., V] at a temperature above 0."""
    return (logits.float() / temperature).softmax(dim=-1)


def draw(weights: Tensor, exponential: Tensor) -> Tensor:
    """One index [...] with a chance proportional to weights [..., V]: the first of exponential clocks to ring."""
    return (weights / exponential).argmax(dim=-1)


def keep_greedily(drafts: Tensor, choices: Tensor) -> Verdict:
    """Keep drafts int [N, B - 1] as far as they are the target's choices int [N, B]."""
    return Verdict(choices, _prefix(drafts == choices[:, :-1]))


def keep_by_rejection(drafts: Tensor, drafted: Tensor, target: Tensor, noise: Noise) -> Verdict:
    """Keep drafts so that what is emitted is distributed as the target alone would sample it.

    A draft x is kept with the chance min(1, p(x) / q(x)); where one falls, the token comes from max(p - q, 0), and
    behind a whole block from p.

    Args:
        drafts: int64 [N, B - 1], drawn from `drafted`.
        drafted: q, float32 [N, B - 1, V].
        target: p, float32 [N, B, V].
        noise: of this round.
    """
    at = drafts[..., None]
    p, q = target[:, :-1].gather(-1, at)[..., 0], drafted.gather(-1, at)[..., 0]
    matched = _prefix(noise.accept * q < p)
    # Behind a whole block nothing was drafted: q is 0 there.
    drafted = torch.cat((drafted, torch.zeros_like(target[:, :1])), dim=1)
    index = matched[:, None, None].expand(-1, 1, target.shape[-1])
    p_there, q_there = target.gather(1, index)[:, 0], drafted.gather(1, index)[:, 0]
    left = (p_there - q_there).clamp(min=0)
    # p = q everywhere rejects nothing, but for rounding.
    own = draw(torch.where(left.sum(dim=-1, keepdim=True) > 0, left, p_there), noise.own)
    tokens = torch.cat((drafts, own[:, None]), dim=1).scatter(1, matched[:, None], own[:, None])
    return Verdict(tokens, matched)


def _prefix(kept: Tensor) -> Tensor:
    """Leading True values of bool [N, B - 1] → int64 [N]."""
    return kept.long().cumprod(dim=1).sum(dim=1)
