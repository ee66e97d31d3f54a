"""Speculative sampling emits what the target alone would: two-sample chi-square tests on 10⁵ draws, fixed seeds."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafter_trainer.drafter import DFlashDrafter, initialise_weights
from drafter_trainer.drafter_config import DFlashConfig
from drafter_trainer.evaluation.batch_decoder import BatchDecoder, DecodingSetting
from drafter_trainer.evaluation.sampling import Noise, draw, keep_by_rejection, keep_greedily, probabilities

DRAWS = 100_000
VOCABULARY = 24
ENOUGH = 10
"""Fewer draws in a bin, on average of both samples: it is merged with its like."""
UNLIKELY = 1e-4


def p_value(one: Tensor, other: Tensor) -> float:
    """Chance that two samples of whole numbers differ at least so much, were they of one distribution."""
    size = int(max(one.max(), other.max())) + 1
    counts = torch.stack([sample.bincount(minlength=size).double() for sample in (one, other)])
    rare = counts.sum(dim=0) < 2 * ENOUGH
    bins = torch.cat((counts[:, ~rare], counts[:, rare].sum(dim=1, keepdim=True)), dim=1)
    bins = bins[:, bins.sum(dim=0) > 0]
    share = bins.sum(dim=1, keepdim=True) / bins.sum()
    expected = share * bins.sum(dim=0)
    statistic = ((bins - expected) ** 2 / expected).sum()
    freedom = torch.tensor((bins.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def rule_case() -> tuple[Tensor, Tensor, Tensor, Noise]:
    """Drafts of 10⁵ rows from q, with q and p for two drafted positions and the one behind them."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, VOCABULARY, generator=generator)
    target = probabilities(logits[:3], 0.7).expand(DRAWS, -1, -1)
    drafted = probabilities(logits[3:], 0.7).expand(DRAWS, -1, -1)
    noise = Noise(DRAWS, 2, VOCABULARY, torch.Generator().manual_seed(2))
    noise.refill()
    return draw(drafted, noise.draft), drafted, target, noise


def own_sample(target: Tensor, seed: int) -> Tensor:
    exponential = torch.empty(DRAWS, VOCABULARY).exponential_(generator=torch.Generator().manual_seed(seed))
    return draw(target, exponential)


def test_every_position_is_distributed_as_the_targets() -> None:
    drafts, drafted, target, noise = rule_case()
    verdict = keep_by_rejection(drafts, drafted, target, noise)
    assert {0, 1, 2} == set(verdict.matched.tolist())
    for position in range(3):
        reached = verdict.matched >= position
        own = own_sample(target[:, position], 3 + position)[: int(reached.sum())]
        assert p_value(verdict.tokens[reached, position], own) > UNLIKELY


def test_a_wrong_rule_would_be_found() -> None:
    """Drawing from p where a draft falls, instead of from what q left over: the textbook mistake."""
    drafts, drafted, target, noise = rule_case()
    verdict = keep_by_rejection(drafts, drafted, target, noise)
    wrong = torch.where(verdict.matched > 0, drafts[:, 0], draw(target[:, 0], noise.own))
    assert p_value(wrong, own_sample(target[:, 0], 3)) < 1e-12


def test_drafts_of_the_target_itself_are_all_kept() -> None:
    _, _, target, noise = rule_case()
    verdict = keep_by_rejection(draw(target[:, :2], noise.draft), target[:, :2], target, noise)
    assert verdict.matched.eq(2).all()


def test_a_draft_that_the_target_never_says_is_never_kept() -> None:
    _, _, target, noise = rule_case()
    never = target.clone()
    never[:, :, 7] = 0
    drafted = torch.zeros_like(never[:, :2])
    drafted[:, :, 7] = 1
    verdict = keep_by_rejection(torch.full((DRAWS, 2), 7), drafted, never, noise)
    assert verdict.matched.eq(0).all() and verdict.tokens[:, 0].ne(7).all()


def test_greedy_keeps_the_matching_prefix() -> None:
    choices = torch.tensor([[4, 5, 6, 7]]).expand(4, -1)
    drafts = torch.tensor([[4, 5, 6], [4, 9, 6], [9, 5, 6], [4, 5, 9]])
    assert keep_greedily(drafts, choices).matched.tolist() == [3, 1, 0, 2]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.3, **sizes, **heads)
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def tiny_drafter() -> DFlashDrafter:
    config = DFlashConfig(
        target_model_type="llama",
        num_target_layers=2,
        target_layer_ids=(0, 1),
        vocab_size=VOCABULARY,
        mask_token_id=0,
        embedding_scale=1.0,
        logit_soft_cap=None,
        block_size=3,
        hidden_size=16,
        num_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=64,
        layer_types=("full_attention",),
        sliding_window=None,
    )
    drafter = DFlashDrafter(config).eval()
    initialise_weights(drafter, 7, torch.ones(16))
    for parameter in drafter.parameters():
        parameter.data.mul_(4 if parameter.dim() == 2 else 1)
    return drafter


def sampled(model: LlamaForCausalLM, drafter: DFlashDrafter | None, seed: int) -> tuple[Tensor, float]:
    """[10⁵, 3] tokens behind one prompt, and tokens per round."""
    rows = 10_000
    decoder = BatchDecoder(model, drafter, DecodingSetting(rows, 16, temperature=1.5, seed=seed))
    prompts = [torch.tensor([3, 9, 1, 14])] * rows
    decodings = [d for _ in range(DRAWS // rows) for d in decoder.decode(prompts, 3, frozenset())]
    rounds = sum(len(d.emitted_per_round) for d in decodings)
    return torch.tensor([d.tokens for d in decodings]), 2 * DRAWS / rounds


def test_sampling_a_model_with_a_drafter_is_sampling_the_model(model: LlamaForCausalLM) -> None:
    plain, _ = sampled(model, None, seed=11)
    speculative, emitted = sampled(model, tiny_drafter(), seed=12)
    assert emitted > 1.3, "drafts must be kept and rejected for this test to mean something"
    for position in range(3):
        assert p_value(speculative[:, position], plain[:, position]) > UNLIKELY
    # Pairs and triples find what single positions hide: a token that does not belong to the one before it.
    base = VOCABULARY ** torch.arange(3)
    assert p_value(speculative[:, :2] @ base[:2], plain[:, :2] @ base[:2]) > UNLIKELY
    assert p_value(speculative @ base, plain @ base) > UNLIKELY
    # And the tests would find it.
    shuffled = plain[torch.randperm(DRAWS, generator=torch.Generator().manual_seed(0)), 2]
    assert p_value(speculative[:, 1] * VOCABULARY + shuffled, plain[:, 1] * VOCABULARY + plain[:, 2]) < UNLIKELY
