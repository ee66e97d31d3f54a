"""The evaluation as a whole on a tiny target: tallies, report, table."""

import copy
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from drafter_trainer.evaluation.compare import Comparison, compare
from drafter_trainer.evaluation.decode import Decoded
from drafter_trainer.evaluation.prompt_decoder import PromptDecoder
from drafter_trainer.evaluation.report import as_json, to_dict, write_text
from drafter_trainer.evaluation.report_table import print_report
from drafter_trainer.evaluation.setting import PLAIN, Setting
from slipstream.chat_rendering import render_chat
from slipstream.errors import SlipstreamError
from slipstream.eval_prompts import Prompt
from slipstream.run_spec.reasons import Reason
from slipstream.target_loading import LoadedTarget
from tests.unit.evaluation.test_decode import random_drafter

SETTINGS = {
    "run": "tiny",
    "checkpoint": "step-00000012",
    "dtype": "float32",
    "gap_bound": 0.0,
    "target": "other",
    "target_verified": False,
    "loop": "caches that grow",
}


def prompts(*sources: str) -> list[Prompt]:
    return [
        Prompt(f"{source}-{i}", source, ({"role": "user", "content": f"What is the number {i}?"},))
        for i, source in enumerate(sources)
    ]


def decode_all(target: LoadedTarget, chosen: list[Prompt], max_new_tokens: int) -> Comparison:
    decoder = PromptDecoder(target, {"trained": random_drafter(target)}, max_new_tokens)
    return compare(((Setting(), prompt, decoder.decode(prompt)) for prompt in chosen), ["trained"], 0.0)[Setting()]


def test_every_prompt_is_counted_under_its_source_and_way(tiny_target: LoadedTarget) -> None:
    comparison = decode_all(tiny_target, prompts("math", "code", "math"), 10)
    assert comparison.lossless
    assert {source: tally.prompts for source, tally in comparison.tallies["trained"].items()} == {"math": 2, "code": 1}
    plain = comparison.tallies[PLAIN]["math"]
    assert plain.accepted_length == 1.0 and plain.rounds == plain.tokens
    trained = comparison.tallies["trained"]["math"]
    assert trained.tokens == plain.tokens
    assert trained.accepted_length == pytest.approx(trained.tokens / trained.rounds)


def test_report_adds_sources_up_and_the_table_says_lossless(tiny_target: LoadedTarget, tmp_path: Path) -> None:
    comparison = decode_all(tiny_target, prompts("math", "code"), 6)
    write_text(tmp_path / "eval.json", as_json(to_dict({Setting(): comparison}, SETTINGS)))
    report = json.loads((tmp_path / "eval.json").read_text())
    rows = report["results"]["trained"]
    assert rows["all"]["rounds"] == rows["math"]["rounds"] + rows["code"]["rounds"]
    assert len(rows["all"]["acceptance_by_position"]) == 3
    out = io.StringIO()
    print_report(report, Console(file=out, width=160))
    assert "Lossless" in out.getvalue() and "math" in out.getvalue()
    assert "Target not verified: other is another one" in out.getvalue()


def test_where_there_is_no_number_the_report_has_null_and_the_table_a_dash(tmp_path: Path) -> None:
    ended = Decoded(tokens=[2], gaps=[1.0])
    cut = Decoded(tokens=[2, 3], gaps=[1.0, 1.0], emitted_per_round=[1], drafts_accepted=[0], num_drafts=1)
    decodings = [(Setting(), prompts("math")[0], {PLAIN: ended, "trained": cut})]
    report = to_dict(compare(decodings, ["trained"], 0.0), SETTINGS)
    write_text(tmp_path / "eval.json", as_json(report))
    assert json.loads((tmp_path / "eval.json").read_text()) == report
    assert report["results"][PLAIN]["math"]["accepted_length"] is None
    assert report["results"]["trained"]["math"]["speed_ratio_to_plain"] is None
    (difference,) = report["differences"]["trained"]
    assert difference["top_two_gap"] is None and not difference["allowed"]
    out = io.StringIO()
    print_report(report, Console(file=out, width=160))
    assert "nan" not in out.getvalue() and "top-two gap -" in out.getvalue()


def test_a_report_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="cannot be written") as caught:
        write_text(tmp_path, as_json({}))
    assert caught.value.reason is Reason.PATH_NOT_ALLOWED


def test_a_prompt_that_the_template_refuses_is_named(tiny_target: LoadedTarget) -> None:
    decoder = decoder_with_template(tiny_target, "{{ raise_exception('no system message') }}")
    with pytest.raises(SlipstreamError, match="refuses prompt math-0: no system message") as caught:
        decoder.decode(prompts("math")[0])
    assert caught.value.reason is Reason.DATA_INVALID


def test_a_prompt_that_the_target_cannot_hold_is_refused_before_it_is_read(tiny_target: LoadedTarget) -> None:
    decoder = PromptDecoder(tiny_target, {}, max_new_tokens=1)
    most = tiny_target.model.config.max_position_embeddings
    with pytest.raises(SlipstreamError, match=f"prompt long has .* the target reads {most}") as caught:
        decoder.decode(Prompt("long", "all", ({"role": "user", "content": "word " * most},)))
    assert caught.value.reason is Reason.DATA_INVALID and caught.value.remedy


def test_prompts_do_not_depend_on_the_day(tiny_target: LoadedTarget) -> None:
    template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0]['content'] }}"
    tokenizer = decoder_with_template(tiny_target, template).target.tokenizer
    assert render_chat(tokenizer, prompts("math")[0].messages, as_prompt=True).startswith("26 Jul 2024: What")


def decoder_with_template(target: LoadedTarget, template: str) -> PromptDecoder:
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = template
    return PromptDecoder(LoadedTarget(target.model, tokenizer, target.files), {}, 4)
