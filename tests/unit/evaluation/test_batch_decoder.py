"""Decoding over caches of fixed size says what recomputing and what growing caches say, whatever the family."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor

from drafter_trainer.drafter import DFlashDrafter, initialise_weights
from drafter_trainer.evaluation.batch_decoder import BatchDecoder, DecodingSetting, static_length
from drafter_trainer.evaluation.captured import captured
from drafter_trainer.evaluation.decode import BlockDrafter, CachedTarget, Decoded, decode_greedily
from drafter_trainer.evaluation.static_drafter import StaticDrafter
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_loading import LoadedTarget, decoder_layers, load_causal_lm
from tests.fakes.tiny_models import FAMILIES, Family, save_tiny_model
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer
from tests.unit.evaluation.test_decode import NO_END, drafter_config, random_drafter

PROMPT = torch.arange(5, 17)


def load(directory: Path, family: Family = "llama") -> LoadedTarget:
    tokenizer = build_tiny_tokenizer(directory, style="chatml")
    save_tiny_model(directory, family, vocab_size=len(tokenizer), seed=3)
    return load_causal_lm(TargetSpec(model=str(directory), dtype="float32"), "cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    """Not `tiny_target`: decoding with fixed caches exchanges the model's attention."""
    return load(tmp_path_factory.mktemp("target"))


def decoder(target: LoadedTarget, drafter: DFlashDrafter | None = None, rows: int = 1) -> BatchDecoder:
    return BatchDecoder(target.model, drafter, DecodingSetting(rows=rows, max_length=128))


def growing(target: LoadedTarget, prompt: Tensor, limit: int) -> Decoded:
    return decode_greedily(CachedTarget(target.model, decoder_layers(target.model), ()), None, prompt, limit, NO_END)


@contextmanager
def counted_graphs() -> Iterator[Callable[[], int]]:
    """How many graphs Dynamo made since."""
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    yield lambda: int(stats["unique_graphs"] - before)


class Foretelling(BatchDecoder):
    """Drafts what it was told that the target will say; wrong at chosen places."""

    def __init__(self, target: LoadedTarget, future: Sequence[int], wrong_at: frozenset[int] = frozenset()) -> None:
        super().__init__(target.model, random_drafter(target), DecodingSetting(rows=1, max_length=128))
        told = [token + 1 if i in wrong_at else token for i, token in enumerate(future)]
        self.future = torch.tensor(told + [0] * self.block_size)

    def draft(self) -> None:
        done = int(self.lengths[0]) - len(PROMPT)
        self.tokens[0, 1:] = self.future[done + 1 : done + self.block_size]


@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_caches_say_what_growing_caches_say(tmp_path: Path, family: Family) -> None:
    target = load(tmp_path, family)
    # Not every version of transformers caps scores (Gemma 2) in its fused attention.
    target.model.set_attn_implementation("eager")
    expected = growing(target, PROMPT, 30)
    (plain,) = decoder(target).decode([PROMPT], 30, NO_END)
    assert plain.tokens == expected.tokens
    assert plain.gaps == pytest.approx(expected.gaps, abs=1e-4)
    assert plain.emitted_per_round == [1] * 29
    config = replace(drafter_config(target, 4), target_model_type=family)
    drafter = DFlashDrafter(config).eval()
    initialise_weights(drafter, 7, torch.ones(config.hidden_size))
    (speculative,) = decoder(target, drafter).decode([PROMPT], 30, NO_END)
    assert speculative.tokens == expected.tokens


def test_every_row_of_a_batch_says_what_it_says_alone(target: LoadedTarget) -> None:
    prompts = [PROMPT, PROMPT[:3], PROMPT[2:9]]
    alone = [decoder(target).decode([prompt], 24, NO_END)[0].tokens for prompt in prompts]
    for drafter in (None, random_drafter(target)):
        together = decoder(target, drafter, rows=4).decode(prompts, 24, NO_END)
        assert [result.tokens for result in together] == alone


def test_a_decoder_serves_one_batch_after_another(target: LoadedTarget) -> None:
    reused = decoder(target, random_drafter(target), rows=2)
    reused.decode([PROMPT, PROMPT[:7]], 30, NO_END)
    (second,) = reused.decode([PROMPT[3:]], 12, NO_END)
    assert second.tokens == decoder(target).decode([PROMPT[3:]], 12, NO_END)[0].tokens


def test_a_drafter_that_knows_the_future_gets_whole_blocks_accepted(target: LoadedTarget) -> None:
    (plain,) = decoder(target).decode([PROMPT], 33, NO_END)
    (speculative,) = Foretelling(target, plain.tokens).decode([PROMPT], 33, NO_END)
    assert speculative.tokens == plain.tokens
    assert speculative.emitted_per_round == [4] * 8
    assert speculative.drafts_accepted == [3] * 8


def test_nothing_behind_a_wrong_draft_is_accepted(target: LoadedTarget) -> None:
    (plain,) = decoder(target).decode([PROMPT], 17, NO_END)
    (speculative,) = Foretelling(target, plain.tokens, frozenset({2, 9})).decode([PROMPT], 17, NO_END)
    assert speculative.tokens == plain.tokens
    assert speculative.drafts_accepted[:4] == [1, 3, 2, 3]


def test_decoding_stops_inside_a_block(target: LoadedTarget) -> None:
    (plain,) = decoder(target).decode([PROMPT], 30, NO_END)
    end = next(token for i, token in enumerate(plain.tokens) if i >= 6 and token not in plain.tokens[:i])
    cut = plain.tokens[: plain.tokens.index(end) + 1]
    (at_end,) = Foretelling(target, plain.tokens).decode([PROMPT], 30, frozenset({end}))
    assert at_end.tokens == cut
    (at_limit,) = Foretelling(target, plain.tokens).decode([PROMPT], 11, NO_END)
    assert at_limit.tokens == plain.tokens[:11] and len(at_limit.gaps) == 11
    assert at_limit.emitted_per_round == [4, 4, 2]


@pytest.mark.parametrize("layer_types", [("full_attention", "full_attention"), ("sliding_attention", "full_attention")])
def test_the_drafter_drafts_as_with_a_growing_context(target: LoadedTarget, layer_types: tuple[str, ...]) -> None:
    config = replace(drafter_config(target, 5), layer_types=layer_types, sliding_window=6)
    drafter = DFlashDrafter(config).eval()
    initialise_weights(drafter, 7, torch.ones(config.hidden_size))
    embedding, head = target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight
    features = torch.randn(2, 11, 2 * config.hidden_size, generator=torch.Generator().manual_seed(0))
    static = StaticDrafter(drafter, embedding, head, 32)
    lengths = torch.tensor([11, 8])
    with torch.no_grad():
        static.extend(features, torch.arange(11).expand(2, -1))
        drafts = static.propose(torch.tensor([3, 4]), lengths[:, None] + torch.arange(5)).argmax(dim=-1)
        for row, length in enumerate(lengths.tolist()):
            alone = BlockDrafter(drafter, embedding, head)
            alone.extend(features[row, :length])
            assert drafts[row].tolist() == alone.propose(3 + row).tolist()


def test_reduced_precision_takes_the_fused_kernel_and_stays_close(target: LoadedTarget, tmp_path: Path) -> None:
    half = load_causal_lm(TargetSpec(model=str(target.files.root), dtype="bfloat16"), "cpu")
    (plain,) = BatchDecoder(half.model, None, DecodingSetting(1, 128)).decode([PROMPT], 2, NO_END)
    assert plain.tokens[0] == decoder(target).decode([PROMPT], 2, NO_END)[0].tokens[0]


def test_sizes_of_caches_are_few() -> None:
    assert [static_length(tokens) for tokens in (1, 256, 257, 1500)] == [256, 256, 512, 2048]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_graphs_without_a_gpu_are_refused_in_words() -> None:
    with pytest.raises(SlipstreamError, match="CUDA graphs need a CUDA device") as caught:
        captured(lambda: None)
    assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED


def test_compiled_layers_say_the_same_and_are_few(tmp_path: Path) -> None:
    """Gemma has two kinds of layers, with a window and without; a family with one kind has nothing more to show."""
    target = load(tmp_path, "gemma3")
    config = replace(drafter_config(target, 4), target_model_type="gemma3")
    drafter = DFlashDrafter(config).eval()
    initialise_weights(drafter, 7, torch.ones(config.hidden_size))
    plain = decoder(target).decode([PROMPT], 20, NO_END)[0].tokens
    # The compiler's front half: it traces what a GPU would get, without a C++ compiler.
    setting = DecodingSetting(rows=1, max_length=128, compiler="aot_eager")
    with counted_graphs() as graphs:
        assert BatchDecoder(target.model, None, setting).decode([PROMPT], 20, NO_END)[0].tokens == plain
    assert graphs() == 2, "one graph serves all layers of a kind"
    with counted_graphs() as graphs:
        assert BatchDecoder(target.model, drafter, setting).decode([PROMPT], 20, NO_END)[0].tokens == plain
    # Drafting and extending may have been compiled before, for another test.
    assert 2 <= graphs() <= 4
