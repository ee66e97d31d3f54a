"""Greedy decoding with a KV cache, with and without a drafter: one loop for both, so that their speeds compare.

A round verifies `[last token, drafts…]` in one target forward, keeps the drafts that match the target's own choices and
adds the target's next token (the bonus). Without a drafter the round has one token: plain decoding.

Shapes: P prompt tokens, S tokens in the cache, B block size, D hidden size, n features, V vocabulary.
"""

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from drafter_trainer.drafter_interface import Drafter


@dataclass
class Decoded:
    """What one prompt gave."""

    tokens: list[int] = field(default_factory=list)
    """New tokens, the end-of-turn token included if it came."""
    gaps: list[float] = field(default_factory=list)
    """Difference of the target's two largest logits where each token was chosen."""
    emitted_per_round: list[int] = field(default_factory=list)
    """Accepted drafts plus the bonus token, per verification round; cut where the answer ended."""
    num_drafts: int = 0
    """Tokens drafted per round; 0 in plain decoding."""
    drafts_accepted: list[int] = field(default_factory=list)
    """Matching prefix per round, before any cut."""
    texts: list[str] = field(default_factory=list)
    """What each token adds to the text; empty where no report asks for it."""
    decode_seconds: float = 0.0
    """All rounds, without the prefill."""


class CachedTarget:
    """The target with its KV cache, capturing the features that the drafter reads.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        layers: its decoder layers.
        layer_ids: zero-based layers whose outputs are the features, ascending; empty for plain decoding.
    """

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList, layer_ids: Sequence[int]) -> None:
        self.model = model
        self.cache = DynamicCache()
        # transformers 5.24 renamed the argument and warns about the old name.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._captured: dict[int, Tensor] = {}
        self._layer_ids = tuple(layer_ids)
        self._hooks = [layers[i].register_forward_hook(self._capture(i)) for i in self._layer_ids]

    def _capture(self, layer_id: int):  # type: ignore[no-untyped-def]
        def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._captured[layer_id] = output if isinstance(output, Tensor) else output[0]

        return hook

    def forward(self, token_ids: Tensor, last_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """Append tokens int [L] to the cache → logits [L, V] (or [1, V]), features [L, n·D] (None without layers)."""
        cache = {self._cache_argument: self.cache}
        logits = self.model(
            input_ids=token_ids[None], use_cache=True, logits_to_keep=1 if last_only else 0, **cache
        ).logits[0]
        features = [self._captured.pop(i)[0] for i in self._layer_ids]
        return logits, torch.cat(features, dim=-1) if features else None

    def drop_last(self, count: int) -> None:
        """Forget the last `count` tokens of the cache."""
        if count:
            self.cache.crop(-count)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class BlockDrafter:
    """A drafter with its context of one document: proposes the B - 1 tokens that may follow.

    Args:
        drafter: evaluation mode, on the target's device and dtype.
        embedding: the target's embedding weight [V, D].
        head: the target's head weight [V, D].
    """

    def __init__(self, drafter: Drafter, embedding: Tensor, head: Tensor) -> None:
        self.drafter, self.embedding, self.head = drafter, embedding, head
        self.context = drafter.growing_context()
        self.length = 0

    def extend(self, features: Tensor) -> None:
        """Append accepted tokens' features [L, n·D] to the context."""
        positions = torch.arange(self.length, self.length + features.shape[0], device=features.device)
        self.context.extend(features[None], positions[None])
        self.length += features.shape[0]

    def propose(self, last_token: int) -> Tensor:
        """Greedy drafts int [B - 1] behind the last accepted token."""
        config = self.drafter.config
        block = torch.full((config.block_size,), config.mask_token_id, device=self.head.device)
        block[0] = last_token
        embedded = functional.embedding(block, self.embedding) * config.embedding_scale
        positions = torch.arange(self.length, self.length + config.block_size, device=self.head.device)
        hidden = self.context.hidden(embedded[None], positions[None])[0]
        # A soft cap is monotonous: it does not change which logit is the largest. The head comes first because CPU
        # libraries multiply a few rows by a wide matrix up to three times slower than a tall matrix by a few columns.
        return (self.head @ hidden[1:].t()).argmax(dim=0)


def _synchronised_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _choices(logits: Tensor) -> tuple[list[int], list[float]]:
    """Greedy tokens and top-two gaps of logits [L, V]."""
    top = logits.float().topk(2, dim=-1)
    return top.indices[:, 0].tolist(), (top.values[:, 0] - top.values[:, 1]).tolist()


def _matching_prefix(drafts: Sequence[int], choices: Sequence[int]) -> int:
    matched = 0
    while matched < len(drafts) and drafts[matched] == choices[matched]:
        matched += 1
    return matched


@torch.inference_mode()
def decode_greedily(
    target: CachedTarget,
    drafter: BlockDrafter | None,
    prompt_ids: Tensor,
    max_new_tokens: int,
    end_ids: frozenset[int],
) -> Decoded:
    """Decode one prompt.

    Args:
        target: with an empty cache.
        drafter: with an empty context; None for plain decoding.
        prompt_ids: int [P], on the target's device.
        max_new_tokens: at least 1.
        end_ids: tokens that end the answer.
    """
    device = prompt_ids.device
    result = Decoded(num_drafts=drafter.drafter.config.block_size - 1 if drafter is not None else 0)
    logits, features = target.forward(prompt_ids, last_only=True)
    if drafter is not None and features is not None:
        drafter.extend(features)
    result.tokens, result.gaps = _choices(logits[-1:])
    prefilled = _synchronised_time(device)
    while len(result.tokens) < max_new_tokens and result.tokens[-1] not in end_ids:
        _one_round(target, drafter, result, max_new_tokens, end_ids)
    result.decode_seconds = _synchronised_time(device) - prefilled
    return result


def _one_round(
    target: CachedTarget, drafter: BlockDrafter | None, result: Decoded, max_new_tokens: int, end_ids: frozenset[int]
) -> None:
    device = target.model.device
    last = torch.tensor([result.tokens[-1]], device=device)
    drafts = drafter.propose(result.tokens[-1]) if drafter is not None else last[:0]
    logits, features = target.forward(torch.cat((last, drafts)))
    choices, gaps = _choices(logits)
    matched = _matching_prefix(drafts.tolist(), choices)
    target.drop_last(len(drafts) - matched)
    if drafter is not None and features is not None:
        drafter.extend(features[: matched + 1])
    emitted = choices[: matched + 1]
    ends = [i for i, token in enumerate(emitted) if token in end_ids]
    kept = min(matched + 1, max_new_tokens - len(result.tokens), ends[0] + 1 if ends else matched + 1)
    result.tokens += emitted[:kept]
    result.gaps += gaps[:kept]
    result.emitted_per_round.append(kept)
    result.drafts_accepted.append(matched)
