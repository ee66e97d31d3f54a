"""Decode every prompt plainly and with each drafter, in turn, and count what the target accepted."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from drafter_trainer.drafter import DFlashDrafter
from drafter_trainer.evaluation.decode import BlockDrafter, CachedTarget, Decoded, decode_greedily
from drafter_trainer.evaluation.losslessness import Difference, first_difference
from drafter_trainer.evaluation.prompts import Prompt
from slipstream.target_loading import LoadedTarget, decoder_layers

WARM_UP_TOKENS = 8
"""Tokens decoded once before anything is timed."""


@dataclass
class Tally:
    """Decodings of one source by one way of decoding."""

    prompts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    emitted: list[int] = field(default_factory=list)
    """Tokens per verification round, bonus included."""
    accepted_at: list[int] = field(default_factory=list)
    """Per drafted position, rounds in which it was accepted."""

    def add(self, decoded: Decoded, num_drafts: int) -> None:
        """Count one prompt. The token that the prefill gives belongs to no round and to no speed."""
        self.prompts += 1
        self.tokens += len(decoded.tokens) - 1
        self.seconds += decoded.decode_seconds
        self.emitted += decoded.emitted_per_round
        self.accepted_at = self.accepted_at or [0] * num_drafts
        for accepted in decoded.drafts_accepted:
            for position in range(accepted):
                self.accepted_at[position] += 1

    @property
    def rounds(self) -> int:
        """Verification rounds."""
        return len(self.emitted)

    @property
    def accepted_length(self) -> float:
        """Mean tokens per round, bonus included: 1.0 for plain decoding."""
        return statistics.fmean(self.emitted) if self.emitted else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the time of all rounds, prefill excluded."""
        return self.tokens / self.seconds if self.seconds else float("nan")

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of rounds in which the draft at position 1, 2, … was accepted."""
        return [count / self.rounds for count in self.accepted_at] if self.rounds else []


PLAIN = "plain"
Tallies = dict[str, dict[str, Tally]]
"""Way of decoding → source → tally."""


@dataclass
class Comparison:
    """What an evaluation found."""

    tallies: Tallies
    differences: dict[str, list[Difference]]
    """Drafter label → prompts whose output is not that of plain decoding."""

    @property
    def lossless(self) -> bool:
        """No difference but those within the stated gap."""
        return all(d.allowed for found in self.differences.values() for d in found)


def end_ids(target: LoadedTarget) -> frozenset[int]:
    """Tokens that end an answer: the model's own and the tokenizer's."""
    configured = target.model.generation_config.eos_token_id if target.model.generation_config else None
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in (*listed, target.tokenizer.eos_token_id) if i is not None)


class Evaluator:
    """Decodes prompts with one target and several drafters.

    Args:
        target: loaded, evaluation mode.
        drafters: by label; all for this target.
        max_new_tokens: per prompt.
        gap_bound: see `losslessness`; 0 in float32.
    """

    def __init__(
        self, target: LoadedTarget, drafters: Mapping[str, DFlashDrafter], max_new_tokens: int, gap_bound: float
    ) -> None:
        self.target, self.drafters = target, dict(drafters)
        self.max_new_tokens, self.gap_bound = max_new_tokens, gap_bound
        self._end_ids = end_ids(target)
        self._embedding = target.model.get_input_embeddings().weight
        self._head = target.model.get_output_embeddings().weight

    def run(self, prompts: Sequence[Prompt], on_prompt: Callable[[int], None]) -> Comparison:
        """Decode all prompts; `on_prompt(done)` is called after each."""
        self._warm_up(prompts[0])
        tallies: Tallies = {label: {} for label in (PLAIN, *self.drafters)}
        differences: dict[str, list[Difference]] = {label: [] for label in self.drafters}
        for done, prompt in enumerate(prompts, start=1):
            ids = self._encode(prompt)
            plain = self._decode(ids, None, self.max_new_tokens)
            tallies[PLAIN].setdefault(prompt.source, Tally()).add(plain, 0)
            for label, drafter in self.drafters.items():
                decoded = self._decode(ids, drafter, self.max_new_tokens)
                tally = tallies[label].setdefault(prompt.source, Tally())
                tally.add(decoded, drafter.config.block_size - 1)
                difference = first_difference(prompt.id, plain, decoded, self.gap_bound)
                differences[label] += [difference] if difference else []
            on_prompt(done)
        return Comparison(tallies, differences)

    def _warm_up(self, prompt: Prompt) -> None:
        for drafter in (None, *self.drafters.values()):
            self._decode(self._encode(prompt), drafter, WARM_UP_TOKENS)

    def _encode(self, prompt: Prompt) -> torch.Tensor:
        text = self.target.tokenizer.apply_chat_template(
            list(prompt.messages), tokenize=False, add_generation_prompt=True
        )
        ids = self.target.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor(ids, device=self.target.model.device)

    def _decode(self, ids: torch.Tensor, drafter: DFlashDrafter | None, max_new_tokens: int) -> Decoded:
        layer_ids = drafter.config.target_layer_ids if drafter is not None else ()
        cached = CachedTarget(self.target.model, decoder_layers(self.target.model), layer_ids)
        block = BlockDrafter(drafter, self._embedding, self._head) if drafter is not None else None
        try:
            return decode_greedily(cached, block, ids, max_new_tokens, self._end_ids)
        finally:
            cached.close()
