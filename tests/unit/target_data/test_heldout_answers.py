"""The target answers the evaluation's prompts: as decoding would, and what it cannot take is refused in words."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from drafter_trainer.evaluation.batch_decoder import BatchDecoder, DecodingSetting
from drafter_trainer.evaluation.decode import CachedTarget, decode_greedily
from slipstream.errors import SlipstreamError
from slipstream.eval_prompts import end_ids
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import EvalSpec, TargetSpec
from slipstream.target_loading import LoadedTarget, decoder_layers, load_causal_lm
from target_server import data_command
from target_server.heldout_answers import answer_heldout, prompts_of
from target_server.regeneration import Asked, Regenerator, Sampling
from tests.fakes.served_model import write_tiny_target
from tests.fakes.tiny_models import save_tiny_model
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer

NO_END: frozenset[int] = frozenset()
WHOSE = {"target": "tiny", "target_fingerprint": "f"}
RECIPE = """
name = "tiny"
[target]
model = "./target"
[data]
files = ["none.jsonl"]
[train]
max_steps = 1
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    directory = write_tiny_target(tmp_path_factory.mktemp("target"))
    return load_causal_lm(TargetSpec(model=str(directory), dtype="float32"), "cpu")


def evaluation(directory: Path, *prompts: dict[str, object], per_source: int | None = None) -> EvalSpec:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return EvalSpec(prompts=str(path), num_prompts=per_source, max_new_tokens=12)


def test_rows_are_what_plain_decoding_gives(target: LoadedTarget, tmp_path: Path) -> None:
    prompts = [{"source": ("b", "a")[n % 2], "prompt": "why " * (n + 1)} for n in range(6)]
    asked = prompts_of(evaluation(tmp_path, *prompts, per_source=2))
    output = tmp_path / "answers.jsonl"
    report = answer_heldout(target, asked, output, sampling=Sampling(12, batch=3), settings=WHOSE)
    assert (report.read, report.used, report.num_dropped) == (4, 4, 0)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["source"] for row in rows] == ["b", "a", "b", "a"]
    assert {row["target_fingerprint"] for row in rows} == {"f"}
    for row in rows:
        start = row["loss_mask"].index(1)
        cached = CachedTarget(target.model, decoder_layers(target.model), ())
        decoded = decode_greedily(cached, None, torch.tensor(row["input_ids"][:start]), 12, end_ids(target))
        assert row["input_ids"][start:] == decoded.tokens
    # The same again is nothing to do; other prompts into the same file are refused.
    written = output.read_bytes()
    answer_heldout(target, asked, output, sampling=Sampling(12, batch=3), settings=WHOSE)
    assert output.read_bytes() == written
    with pytest.raises(SlipstreamError, match="was begun with other settings: prompts"):
        answer_heldout(target, asked[:1], output, sampling=Sampling(12, batch=3), settings=WHOSE)


def test_rows_that_the_tokenizer_does_not_know_are_never_chosen(tmp_path: Path) -> None:
    """Padding of the vocabulary that the model likes best: regenerated and evaluated as if it were not there."""
    tokens = len(build_tiny_tokenizer(tmp_path))
    save_tiny_model(tmp_path, "gemma2", vocab_size=tokens + 8)
    target = load_causal_lm(TargetSpec(model=str(tmp_path), dtype="float32"), "cpu")
    torch.nn.init.normal_(target.model.get_output_embeddings().weight[tokens:], std=5.0)
    ids = torch.tensor([3, 5, 7])
    tempted = decode_greedily(CachedTarget(target.model, decoder_layers(target.model), ()), None, ids, 12, NO_END)
    assert max(tempted.tokens) >= tokens, "else this test shows nothing"
    asked = Asked("p", ids.tolist(), "a")
    (greedy,) = Regenerator(target, Sampling(12), NO_END).answer([asked], 0)
    (drawn,) = Regenerator(target, Sampling(12, temperature=2.0), NO_END).answer([asked], 0)
    assert max(greedy.token_ids) < tokens and max(drawn.token_ids) < tokens
    growing = decode_greedily(CachedTarget(target.model, decoder_layers(target.model), ()), None, ids, 12, NO_END)
    (fixed,) = BatchDecoder(target.model, None, DecodingSetting(1, 64)).decode([ids], 12, NO_END)
    assert growing.tokens == fixed.tokens == greedy.token_ids


def test_it_says_what_is_left_before_the_first_answer(
    target: LoadedTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = prompts_of(evaluation(tmp_path, *({"prompt": "why " * (n + 1)} for n in range(9))))

    def answer() -> list[tuple[str, object]]:
        caplog.clear()
        with caplog.at_level("INFO", logger="target_server.regeneration"):
            answer_heldout(target, asked, tmp_path / "answers.jsonl", sampling=Sampling(2, batch=1), settings=WHOSE)
        return [(record.message, record.slipstream_fields["prompts"]) for record in caplog.records]  # type: ignore[attr-defined]

    assert answer() == [("answering", "0/9"), ("answered", "8/9"), ("answered", "9/9")]
    assert answer() == [], "all is answered"


def test_a_prompt_that_the_target_cannot_take(target: LoadedTarget, tmp_path: Path) -> None:
    asked = prompts_of(evaluation(tmp_path, {"prompt": "a"}, {"id": "long", "prompt": "why " * 5000}))
    with pytest.raises(SlipstreamError, match="Prompt long of eval.prompts cannot be answered: it has") as refused:
        answer_heldout(target, asked, tmp_path / "answers.jsonl", sampling=Sampling(12), settings=WHOSE)
    assert refused.value.reason is Reason.DATA_INVALID
    assert not (tmp_path / "answers.jsonl").exists(), "nothing is answered before all was looked at"


@pytest.mark.parametrize(
    ("settings", "arguments", "says"),
    [
        ("", (), "the recipe has no eval.heldout"),
        ('[eval]\nheldout = "h.jsonl"\n', (), "the recipe has no eval.prompts"),
        ('[eval]\nheldout = "h.jsonl"\nprompts = "p.jsonl"\n', (), "p.jsonl holds no prompts"),
        ('[eval]\nheldout = "h.jsonl"\nprompts = "p.jsonl"\n', ("--temperature", "1"), "flags ask for something else"),
        ('[eval]\nheldout = "h.jsonl"\nprompts = "p.jsonl"\n', ("--max-new-tokens", "9"), "flags ask for"),
    ],
)
def test_what_is_refused_before_a_target_is_loaded(
    tmp_path: Path, settings: str, arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE + settings)
    (tmp_path / "p.jsonl").write_text("\n")
    assert says in refusal(tmp_path, str(tmp_path / "recipe.toml"), *arguments).message


def test_the_key_to_add_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE + '[eval]\nprompts = "p.jsonl"\n')
    remedy = refusal(tmp_path, str(tmp_path / "recipe.toml")).remedy
    assert 'Add heldout = "heldout.jsonl" to the [eval] table' in remedy


def test_files_have_no_evaluation(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("{}\n")
    error = refusal(tmp_path, str(tmp_path / "data.jsonl"), "--model", "m")
    assert "is about the [eval] table of a recipe" in error.message and error.reason is Reason.SPEC_INVALID


def refusal(directory: Path, *arguments: str) -> SlipstreamError:
    parser = argparse.ArgumentParser()
    data_command.add_parsers(parser.add_subparsers(dest="command"))
    given = parser.parse_args(["regenerate", "--heldout", "--report", str(directory / "r.json"), *arguments])
    with pytest.raises(SlipstreamError) as refused:
        data_command.run(given)
    return refused.value
