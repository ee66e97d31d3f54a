"""Decoding with caches of fixed size: greedy or sampled, with a drafter or without, several prompts at once.

One loop for all of it, so that speeds compare. Rounds run on the device alone, as one CUDA graph where asked for; the
host reads once a round what was emitted.

Shapes: N rows, B tokens that a round verifies (1 without a drafter), S tokens that a row can hold, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from drafter_trainer.drafter_interface import Drafter
from drafter_trainer.evaluation.captured import captured
from drafter_trainer.evaluation.decode import Decoded
from drafter_trainer.evaluation.sampling import Noise, Verdict, draw, keep_by_rejection, keep_greedily, probabilities
from drafter_trainer.evaluation.static_drafter import StaticDrafter
from drafter_trainer.evaluation.static_target import StaticTarget, compiled

SHORTEST = 256


def static_length(tokens: int) -> int:
    """The size of caches that hold so many tokens: doubled from 256, so that few sizes serve all prompts."""
    length = SHORTEST
    while length < tokens:
        length *= 2
    return length


@dataclass(frozen=True)
class DecodingSetting:
    """What a decoder is made for."""

    rows: int
    """Prompts at once (N)."""
    max_length: int
    """Prompt, new tokens and one block (S)."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Of sampling."""
    graphs: bool = False
    """Capture a round as a CUDA graph."""
    compiler: str | None = None
    """Backend of torch.compile for the target's layers and the drafter; None: nothing is compiled."""


class BatchDecoder:
    """One way of decoding, with its caches and its round.

    Args:
        model: the target, evaluation mode; its attention is exchanged for good.
        drafter: on its device and in its dtype; None for plain decoding.
        setting: see there.
    """

    def __init__(self, model: PreTrainedModel, drafter: Drafter | None, setting: DecodingSetting) -> None:
        self.setting, device = setting, model.device
        layer_ids = drafter.config.target_layer_ids if drafter is not None else ()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        self.target = StaticTarget(model, layer_ids, setting.max_length, setting.compiler)
        self.drafter = StaticDrafter(drafter, embedding, head, setting.max_length) if drafter is not None else None
        self._propose: Callable[[Tensor, Tensor], Tensor] | None = None
        self._extend: Callable[[Tensor, Tensor], None] | None = None
        if self.drafter is not None:
            self._propose, self._extend = self.drafter.propose, self.drafter.extend
            if setting.compiler is not None:
                self._propose, self._extend = (compiled(f, setting.compiler) for f in (self._propose, self._extend))
        self.block_size = self.drafter.block_size if self.drafter is not None else 1
        rows, block = setting.rows, self.block_size
        self._slots = torch.arange(block, device=device)
        # What a round reads and writes stays where it is: a captured round knows addresses, not names.
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        """Tokens in the cache; the last token is not among them."""
        self.limits = torch.zeros_like(self.lengths)
        """A row that has ended goes on in its place, where nobody reads it."""
        self.tokens = torch.zeros(rows, block, dtype=torch.int64, device=device)
        """The last token, then the drafts."""
        self.emitted = torch.zeros(rows, 2 * block + 1, dtype=torch.float64, device=device)
        """Tokens, top-two gaps, and how many drafts were kept: all that the host reads."""
        self.generator = torch.Generator(device).manual_seed(setting.seed)
        self.noise = Noise(rows, block - 1, head.shape[0], self.generator) if setting.temperature > 0 else None
        self._drafted = torch.zeros(0, device=device)
        self._round: Callable[[], None] | None = None

    @torch.no_grad()
    def decode(self, prompts: Sequence[Tensor], max_new_tokens: int, end_ids: frozenset[int]) -> list[Decoded]:
        """Decode prompts, int [P] each; at most as many as there are rows.

        Every prompt is charged an equal share of the batch's time, which ends with its longest answer.
        """
        rows = self.setting.rows
        assert 0 < len(prompts) <= rows, f"{len(prompts)} prompts for {rows} rows"
        filled = [*prompts, *[prompts[0]] * (rows - len(prompts))]
        self.prepare(filled, max_new_tokens)
        results = [Decoded(num_drafts=self.block_size - 1) for _ in prompts]
        for result, (token, gap) in zip(results, self.prefill(filled, max_new_tokens), strict=False):
            result.tokens, result.gaps = [int(token)], [gap]
        began = self._synchronised_time()
        while any(not _ended(result, max_new_tokens, end_ids) for result in results):
            self.step()
            for result, row in zip(results, self.emitted.tolist(), strict=False):
                if not _ended(result, max_new_tokens, end_ids):
                    _add_round(result, row, max_new_tokens, end_ids)
        seconds = self._synchronised_time() - began
        for result in results:
            result.decode_seconds = seconds / len(results)
        return results

    @torch.no_grad()
    def prepare(self, prompts: Sequence[Tensor], max_new_tokens: int) -> None:
        """Capture (or at least warm) the round, once. It changes the rows: `prefill` must follow."""
        if self._round is None:
            self.prefill(prompts, max_new_tokens)
            self._round = captured(self.run_round) if self.setting.graphs else self.run_round
            self.step()

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Tensor], max_new_tokens: int) -> list[list[float]]:
        """Begin anew with one prompt a row → first token and its top-two gap, by row."""
        sizes = [len(prompt) for prompt in prompts]
        assert max(sizes) + max_new_tokens + self.block_size <= self.setting.max_length, "the caches are too short"
        # Padding is written behind a row's end, where the row's own tokens overwrite it before they could see it.
        token_ids = pad_sequence(list(prompts), batch_first=True)
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        ends = sorted(set(sizes))
        kept = torch.tensor([end - 1 for end in ends], device=token_ids.device)
        logits, features = self.target.forward(token_ids, positions, keep=kept)
        if self.drafter is not None and features is not None:
            self.drafter.extend(features, positions)
        of_row = torch.tensor([ends.index(size) for size in sizes], device=token_ids.device)
        last = logits[torch.arange(len(sizes), device=token_ids.device), of_row]
        first, gaps = greedy_choices(last)
        if self.noise is not None:
            self.noise.refill()
            first = draw(probabilities(last, self.setting.temperature), self.noise.own)
        self.lengths.copy_(torch.tensor(sizes))
        self.limits.copy_(torch.tensor(sizes) + max_new_tokens)
        self.tokens[:, 0] = first
        return torch.stack((first.double(), gaps.double()), dim=1).tolist()

    def step(self) -> None:
        """One round of all rows, captured if so set; `emitted` holds what came of it."""
        assert self._round is not None, "prepare comes first"
        if self.noise is not None:
            self.noise.refill()
        self._round()

    def run_round(self) -> None:
        """Draft, verify, keep: the part of a round that runs on the device."""
        self.draft()
        self.verify()

    @torch.no_grad()
    def draft(self) -> None:
        """Fill `tokens` behind the last one."""
        if self._propose is None:
            return
        logits = self._propose(self.tokens[:, 0], self._positions())
        if self.noise is None:
            self.tokens[:, 1:] = logits.argmax(dim=-1)
        else:
            self._drafted = probabilities(logits, self.setting.temperature)
            self.tokens[:, 1:] = draw(self._drafted, self.noise.draft)

    @torch.no_grad()
    def verify(self) -> None:
        """Run the target over `tokens`, keep what holds, and go on to the next round's place."""
        positions = self._positions()
        logits, features = self.target.forward(self.tokens, positions, repeated=True)
        if self._extend is not None and features is not None:
            self._extend(features, positions)
        choices, gaps = greedy_choices(logits)
        verdict = self._keep(logits, choices)
        self.emitted[:, : self.block_size] = verdict.tokens
        self.emitted[:, self.block_size : -1] = gaps
        self.emitted[:, -1] = verdict.matched
        self.tokens[:, 0] = verdict.tokens.gather(1, verdict.matched[:, None])[:, 0]
        self.lengths.copy_(torch.minimum(self.lengths + verdict.matched + 1, self.limits))

    def _keep(self, logits: Tensor, choices: Tensor) -> Verdict:
        drafts = self.tokens[:, 1:]
        if self.noise is None:
            return keep_greedily(drafts, choices)
        target = probabilities(logits, self.setting.temperature)
        if self.drafter is None:
            return Verdict(draw(target[:, 0], self.noise.own)[:, None], torch.zeros_like(self.lengths))
        return keep_by_rejection(drafts, self._drafted, target, self.noise)

    def _positions(self) -> Tensor:
        return self.lengths[:, None] + self._slots

    def _synchronised_time(self) -> float:
        if self.lengths.is_cuda:
            torch.cuda.synchronize(self.lengths.device)
        return time.perf_counter()


def greedy_choices(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logits' tokens int64 [...] and float32 distances to the second largest, of logits [..., V]."""
    largest, tokens = logits.max(dim=-1)
    second = logits.scatter(-1, tokens[..., None], float("-inf")).amax(dim=-1)
    return tokens, largest.float() - second.float()


def _ended(result: Decoded, max_new_tokens: int, end_ids: frozenset[int]) -> bool:
    return len(result.tokens) >= max_new_tokens or result.tokens[-1] in end_ids


def _add_round(result: Decoded, row: list[float], max_new_tokens: int, end_ids: frozenset[int]) -> None:
    block, matched = len(row) // 2, int(row[-1])
    tokens = [int(token) for token in row[: matched + 1]]
    ends = [i for i, token in enumerate(tokens) if token in end_ids]
    kept = min(matched + 1, max_new_tokens - len(result.tokens), ends[0] + 1 if ends else matched + 1)
    result.tokens += tokens[:kept]
    result.gaps += row[block : block + kept]
    result.emitted_per_round.append(kept)
    result.drafts_accepted.append(matched)
