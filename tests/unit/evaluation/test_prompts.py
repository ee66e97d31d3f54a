"""Prompts are read as written, limited per source, and refused in words with the line that is wrong."""

import gzip
import json
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.eval_prompts import load_prompts
from slipstream.run_spec.reasons import Reason

USER = [{"role": "user", "content": "Hi"}]


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_the_first_prompts_of_every_source_in_file_order(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl", *({"id": f"{s}{i}", "source": s, "messages": USER} for i in range(3) for s in "ab")
    )
    assert [p.id for p in load_prompts(path, 2)] == ["a0", "b0", "a1", "b1"]
    assert len(load_prompts(path, None)) == 6


def test_plain_prompts_and_gzip(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "Grüße"}) + "\n\n")
    (prompt,) = load_prompts(path, None)
    assert prompt.messages == ({"role": "user", "content": "Grüße"},)
    assert prompt.id == "q.jsonl.gz:1"


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"messages": []}, "has `messages` that are no such list, expected `messages` (role and content"),
        ({"messages": [*USER, {"role": "assistant", "content": "x"}]}, "has `messages` whose last is from 'assistant'"),
        ({"messages": [{"role": "user", "content": 3}]}, "has `messages` that are no such list"),
        ({"prompt": 7}, "has no text in the keys 'prompt'"),
        ({"question": "why?", "answer": 3}, "has the keys 'question', 'answer', expected"),
        ({str(n): n for n in range(9)}, "'4', '5', …, expected"),
        ({}, "has no keys"),
        (["no", "object"], "is a JSON list, expected an object"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_with_what_it_is(tmp_path: Path, record: object, found: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "good"}, record)
    with pytest.raises(SlipstreamError, match="p.jsonl:2") as caught:
        load_prompts(path, None)
    assert caught.value.reason is Reason.DATA_INVALID and found in caught.value.message


def test_missing_empty_broken_and_cut_files(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text("{]\n")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 99)[:-10])
    for name in ("missing.jsonl", "empty.jsonl", "broken.jsonl", "cut.jsonl.gz"):
        with pytest.raises(SlipstreamError, match=name.partition(".")[0]) as caught:
            load_prompts(tmp_path / name, None)
        assert caught.value.reason is Reason.DATA_INVALID and caught.value.remedy


def test_half_a_surrogate_pair_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(r'{"prompt": "\ud800 alone"}' + "\n")
    with pytest.raises(SlipstreamError, match="prompts.jsonl:1 has half a surrogate pair"):
        load_prompts(path, None)
    path.write_text(r'{"prompt": "\ud83d\ude00"}' + "\n")
    assert load_prompts(path, None)[0].messages[0]["content"] == "\U0001f600"
