"""Speculative decoding gives exactly the target's greedy text, counts rounds right, and stops where it must."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from drafter_trainer.drafter import DFlashDrafter, initialise_weights
from drafter_trainer.drafter_config import DFlashConfig
from drafter_trainer.evaluation.decode import BlockDrafter, CachedTarget, Decoded, decode_greedily
from slipstream.target_loading import LoadedTarget, decoder_layers

NO_END: frozenset[int] = frozenset()


def drafter_config(target: LoadedTarget, block_size: int) -> DFlashConfig:
    config = target.model.config
    return DFlashConfig(
        target_model_type="llama",
        num_target_layers=4,
        target_layer_ids=(1, 3),
        vocab_size=config.vocab_size,
        mask_token_id=0,
        embedding_scale=1.0,
        logit_soft_cap=None,
        block_size=block_size,
        hidden_size=config.hidden_size,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=4096,
        layer_types=("full_attention", "full_attention"),
        sliding_window=None,
    )


def random_drafter(target: LoadedTarget, block_size: int = 4) -> DFlashDrafter:
    drafter = DFlashDrafter(drafter_config(target, block_size)).eval()
    initialise_weights(drafter, 7, torch.ones(target.model.config.hidden_size))
    return drafter


class ForetellingDrafter(BlockDrafter):
    """Proposes what it was told the target will say; wrong at chosen places."""

    def __init__(self, target: LoadedTarget, future: Sequence[int], wrong_at: frozenset[int] = frozenset()) -> None:
        weight = target.model.get_output_embeddings().weight
        super().__init__(random_drafter(target), weight, weight)
        self.future, self.wrong_at = list(future), wrong_at
        self.prompt_length: int | None = None

    def extend(self, features: Tensor) -> None:
        super().extend(features)
        self.prompt_length = self.prompt_length or features.shape[0]

    def propose(self, last_token: int) -> Tensor:
        assert self.prompt_length is not None
        done = self.length - self.prompt_length  # the last token is future[done]
        assert last_token == self.future[done]
        drafts = []
        for position in range(done + 1, done + self.drafter.config.block_size):
            token = self.future[position] if position < len(self.future) else 0
            drafts.append(token + 1 if position in self.wrong_at else token)
        return torch.tensor(drafts)


def decode(target: LoadedTarget, drafter: BlockDrafter | None, limit: int, end: frozenset[int] = NO_END) -> Decoded:
    layer_ids = drafter.drafter.config.target_layer_ids if drafter else ()
    cached = CachedTarget(target.model, decoder_layers(target.model), layer_ids)
    try:
        return decode_greedily(cached, drafter, torch.arange(5, 17), limit, end)
    finally:
        cached.close()


def test_plain_decoding_equals_recomputing_everything_at_every_token(tiny_target: LoadedTarget) -> None:
    decoded = decode(tiny_target, None, 12)
    ids = torch.arange(5, 17)
    for token in decoded.tokens:
        logits = tiny_target.model(ids[None]).logits[0, -1]
        assert int(logits.argmax()) == token
        ids = torch.cat((ids, torch.tensor([token])))
    assert decoded.emitted_per_round == [1] * 11


@pytest.mark.parametrize("block_size", [2, 4, 7])
def test_a_random_drafter_changes_nothing_but_the_number_of_rounds(tiny_target: LoadedTarget, block_size: int) -> None:
    weight = tiny_target.model.get_output_embeddings().weight
    embedding = tiny_target.model.get_input_embeddings().weight
    drafter = BlockDrafter(random_drafter(tiny_target, block_size), embedding, weight)
    speculative, plain = decode(tiny_target, drafter, 40), decode(tiny_target, None, 40)
    assert speculative.tokens == plain.tokens
    assert sum(speculative.emitted_per_round) == 39
    assert len(speculative.drafts_accepted) == len(speculative.emitted_per_round)
    # Every accepted token but the last has its features in the context.
    assert drafter.length >= 12 + 39 - 1


def test_a_drafter_that_knows_the_future_gets_whole_blocks_accepted(tiny_target: LoadedTarget) -> None:
    plain = decode(tiny_target, None, 33)
    speculative = decode(tiny_target, ForetellingDrafter(tiny_target, plain.tokens), 33)
    assert speculative.tokens == plain.tokens
    assert speculative.emitted_per_round == [4] * 8
    assert speculative.drafts_accepted == [3] * 8


def test_nothing_behind_a_wrong_draft_is_accepted(tiny_target: LoadedTarget) -> None:
    plain = decode(tiny_target, None, 17)
    drafter = ForetellingDrafter(tiny_target, plain.tokens, wrong_at=frozenset({2, 9}))
    speculative = decode(tiny_target, drafter, 17)
    assert speculative.tokens == plain.tokens
    # Rounds start behind tokens 0, 2, 6, 9, 13: the wrong draft ends its round, the target's own token takes its place.
    assert speculative.drafts_accepted[:4] == [1, 3, 2, 3]


def test_decoding_stops_at_the_end_token_inside_a_block(tiny_target: LoadedTarget) -> None:
    plain = decode(tiny_target, None, 30)
    end = next(token for i, token in enumerate(plain.tokens) if i >= 6 and token not in plain.tokens[:i])
    cut = plain.tokens[: plain.tokens.index(end) + 1]
    speculative = decode(tiny_target, ForetellingDrafter(tiny_target, plain.tokens), 30, frozenset({end}))
    assert speculative.tokens == cut == decode(tiny_target, None, 30, frozenset({end})).tokens
    assert sum(speculative.emitted_per_round) == len(cut) - 1


def test_decoding_stops_at_the_limit_inside_a_block(tiny_target: LoadedTarget) -> None:
    plain = decode(tiny_target, None, 11)
    speculative = decode(tiny_target, ForetellingDrafter(tiny_target, decode(tiny_target, None, 20).tokens), 11)
    assert speculative.tokens == plain.tokens
    assert len(speculative.tokens) == 11 == len(speculative.gaps)
    assert speculative.emitted_per_round == [4, 4, 2]
