"""The pages of a report: complete, self-contained, and safe whatever a model says."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from drafter_trainer.evaluation.compare import PromptCount, compare
from drafter_trainer.evaluation.decode import Decoded
from drafter_trainer.evaluation.intervals import intervals
from drafter_trainer.evaluation.prompt_decoder import PromptDecoder
from drafter_trainer.evaluation.report import losslessness_in_words, part_batches_in_words, to_dict
from drafter_trainer.evaluation.report_pages import to_html, to_markdown, write_pages
from drafter_trainer.evaluation.samples import kinds, token_texts
from drafter_trainer.evaluation.setting import PLAIN, DecodingPlan, Setting
from slipstream.eval_prompts import Prompt
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_loading import LoadedTarget
from tests.unit.evaluation.test_decode import random_drafter

HOSTILE = "</pre></span><script src='https://evil.example/x.js'>alert(1)</script>&amp;\"<img onerror=x>"
SETTINGS = {
    "run": HOSTILE,
    "checkpoint": "step-1",
    "target": HOSTILE,
    "target_verified": False,
    "dtype": "bfloat16",
    "gap_bound": 0.5,
}
VOID = {"meta", "img", "br", "line", "rect", "polyline"}


class Page(HTMLParser):
    """Tags in order, attributes, and whether every tag is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def decoded(number: int, drafted: bool) -> Decoded:
    """Nine tokens; with a drafter in two rounds, of three and one drafts."""
    if not drafted:
        return Decoded(list(range(9)), [0.2] * 9, [1] * 8, 0, [0] * 8, decode_seconds=0.8)
    texts = ["a", "<b>", HOSTILE, "d", "e", "f", "g", "h", "|"]
    return Decoded([*range(8), 8 + number % 2], [0.1] * 9, [4, 2, 2], 3, [3, 1, 1], texts, decode_seconds=0.4)


@pytest.fixture
def report() -> dict[str, Any]:
    def decodings() -> Any:
        for setting in (Setting(), Setting(4, 0.8)):
            for number in range(6):
                question = ({"role": "user", "content": HOSTILE},)
                prompt = Prompt(f"{HOSTILE}-{number}", ["math", HOSTILE][number % 2], question)
                yield setting, prompt, {PLAIN: decoded(number, False), "trained": decoded(number, True)}

    return to_dict(compare(decodings(), ["trained"], 0.5), SETTINGS)


def test_nothing_that_a_model_says_becomes_markup(report: dict[str, Any]) -> None:
    page = Page(to_html(report))
    assert {"script", "img", "iframe", "link", "object"}.isdisjoint(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert HOSTILE in page.text


def test_the_page_loads_nothing(report: dict[str, Any]) -> None:
    text = to_html(report)
    page = Page(text)
    assert {"src", "href", "srcset", "xlink:href"}.isdisjoint(name for name, _ in page.attributes)
    assert "@import" not in text and "url(" not in text
    assert page.tags.count("svg") == 4


def test_pieces_are_coloured_by_where_they_came_from(report: dict[str, Any]) -> None:
    page = Page(to_html(report))
    classes = [value for name, value in page.attributes if name == "class" and value in ("first", "draft", "bonus")]
    samples = len(report["samples"])
    assert samples == 2 * 2 * 2, "two of each source and setting"
    # One of each kind in the legend.
    assert {kind: classes.count(kind) - 1 for kind in ("first", "draft", "bonus")} == {
        "first": samples,
        "draft": 5 * samples,
        "bonus": 3 * samples,
    }


def test_markdown_has_a_row_for_every_source_and_quotes_answers(report: dict[str, Any]) -> None:
    lines = to_markdown(report).splitlines()
    rows = [line for line in lines if line.startswith("| batch")]
    measured, positions = rows[: 2 * 2 * 3], rows[2 * 2 * 3 :]
    assert all(line.count("|") - line.count("\\|") == 9 for line in measured)
    assert len(positions) == 2 * 3 and all(line.endswith("| 100% | 33% | 33% |") for line in positions)
    assert any(line.startswith("    a[<b>]") for line in lines)


def test_batches_that_were_not_full_are_named(report: dict[str, Any]) -> None:
    (words,) = part_batches_in_words(report)
    assert words.startswith(f"Batch 4 was not always full (math, {HOSTILE}): its empty rows took time")


def test_three_files_are_written(report: dict[str, Any], tmp_path: Path) -> None:
    write_pages(tmp_path / "pages", report)
    assert {path.name for path in (tmp_path / "pages").iterdir()} == {"eval.json", "eval.md", "eval.html"}
    assert to_html(json.loads((tmp_path / "pages" / "eval.json").read_text())) == to_html(report)


def test_sampled_outputs_are_not_compared(report: dict[str, Any]) -> None:
    greedy, sampled = report["by_setting"]
    assert greedy["lossless"] is True and len(greedy["differences"]["trained"]) == 3
    assert sampled["lossless"] is None and sampled["differences"]["trained"] == []


def test_errors_are_listed_first_and_what_is_left_out_is_said(report: dict[str, Any]) -> None:
    difference = report["by_setting"][0]["differences"]["trained"][0]
    many = [difference | {"prompt": f"p{n}", "allowed": n != 29} for n in range(30)]
    report["by_setting"][0]["differences"] = {"trained": many}
    lines = losslessness_in_words(report)
    assert "(bfloat16): 30; allowed" in lines[0] and lines[0].endswith("apart: 29, not allowed: 1.")
    assert lines[1].startswith("  p29 at token") and lines[1].endswith("← error")
    assert len(lines) == 22 and lines[-1] == "  and 10 more, all of them in the JSON"


def test_a_round_that_is_cut_keeps_its_drafts_apart_from_the_bonus() -> None:
    cut = Decoded([1, 2, 3, 4, 5], [1.0] * 5, [3, 1], 3, [2, 3])
    assert kinds(cut) == ["first", "draft", "draft", "bonus", "draft"]


def test_texts_of_tokens_add_up_also_where_a_character_takes_several(tiny_target: LoadedTarget) -> None:
    text = "why, naïve 日本?"
    tokens = tiny_target.tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(tiny_target.tokenizer, tokens)
    assert len(texts) == len(tokens) and "".join(texts) == text
    assert "" in texts and "\ufffd" not in "".join(texts)


def test_answers_come_with_their_texts_where_a_report_asks(tiny_target: LoadedTarget) -> None:
    plan = DecodingPlan(Path(), TargetSpec(model="x"), "cpu", 1, 6, None, with_texts=True)
    decoder = PromptDecoder(tiny_target, {"trained": random_drafter(tiny_target)}, 6, plan)
    by_way = decoder.decode(Prompt("p", "s", ({"role": "user", "content": "why?"},)))
    assert len(by_way["trained"].texts) == len(by_way["trained"].tokens) and by_way[PLAIN].texts == []


def test_intervals_hold_the_number_and_narrow_with_prompts() -> None:
    def counts(number: int) -> list[PromptCount]:
        return [PromptCount(100 + 10 * (i % 5), 50 + 9 * (i % 3), 1.0 + 0.1 * (i % 4)) for i in range(number)]

    few, many = (intervals(counts(n), counts(n)) for n in (12, 120))
    of_few, of_many = few["accepted_length"], many["accepted_length"]
    assert of_few is not None and of_many is not None
    assert of_few[0] < 120 / 59 < of_few[1]
    assert of_many[1] - of_many[0] < (of_few[1] - of_few[0]) / 2
    # Against itself nothing moves: the two decodings of a prompt are drawn together.
    assert few["speed_ratio_to_plain"] == (1.0, 1.0)


def test_one_prompt_has_no_interval() -> None:
    one = [PromptCount(3, 2, 0.1)]
    assert set(intervals(one, one).values()) == {None}
    assert set(intervals([], []).values()) == {None}
