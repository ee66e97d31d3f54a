"""The file of held-out answers: what is read, and what is refused in words."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.heldout_rows import load_rows
from slipstream.run_spec.reasons import Reason

ROW: dict[str, Any] = {
    "id": "p0",
    "source": "news",
    "target_fingerprint": "f",
    "finished": True,
    "answer": "text",
    "input_ids": [4, 5, 6, 7],
    "loss_mask": [0, 0, 1, 1],
}


def write(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def refusal(path: Path, *, fingerprint: str = "f", pack_tokens: int = 128) -> SlipstreamError:
    with pytest.raises(SlipstreamError) as refused:
        load_rows(path, target_fingerprint=fingerprint, pack_tokens=pack_tokens)
    assert refused.value.remedy
    return refused.value


def test_rows_and_what_names_the_set(tmp_path: Path) -> None:
    other = ROW | {"source": "code", "input_ids": [9, 8], "loss_mask": [0, 1]}
    path = write(tmp_path / "a.jsonl", ROW, "", ROW | {"source": "code"}, other)
    found = load_rows(path, target_fingerprint="f", pack_tokens=128)
    assert found.sources == ("news", "code")
    assert [(row.answer_start, row.num_drafted) for row in found.rows] == [(2, 1), (2, 1), (1, 0)]
    # Texts for people are no part of it, tokens are.
    same = write(tmp_path / "b.jsonl", ROW | {"answer": "?"}, ROW | {"source": "code", "id": "q"}, other)
    assert load_rows(same, target_fingerprint="f", pack_tokens=128).digest == found.digest
    another = write(tmp_path / "c.jsonl", ROW, ROW | {"source": "code", "input_ids": [4, 5, 6, 8]}, other)
    assert load_rows(another, target_fingerprint="f", pack_tokens=128).digest != found.digest


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "a.jsonl:1 is no held-out answer: the line: "),
        ("[]", "the line: Input should be an object"),
        (ROW | {"source": ""}, "source: String should have at least 1 character"),
        (
            {key: value for key, value in ROW.items() if key != "target_fingerprint"},
            "target_fingerprint: Field required",
        ),
        (ROW | {"input_ids": [4, -5, 6, 7]}, "input_ids.1: Input should be greater than or equal to 0"),
        (ROW | {"input_ids": [4, 5.5, 6, 7]}, "input_ids.1: Input should be a valid integer"),
        (ROW | {"loss_mask": [0, 1, 1]}, "must be 0 on a prompt and 1 on the one answer after it"),
        (ROW | {"loss_mask": [0, 0, 0, 0]}, "must be 0 on a prompt and 1 on the one answer after it"),
        (ROW | {"loss_mask": [1, 1, 1, 1]}, "must be 0 on a prompt and 1 on the one answer after it"),
        (ROW | {"loss_mask": [0, 1, 0, 1]}, "must be 0 on a prompt and 1 on the one answer after it"),
    ],
)
def test_a_line_that_is_no_answer(tmp_path: Path, row: dict[str, Any] | str, says: str) -> None:
    error = refusal(write(tmp_path / "a.jsonl", row))
    assert error.reason is Reason.DATA_INVALID and says in error.message


def test_a_file_that_cannot_be_measured_on(tmp_path: Path) -> None:
    missing = refusal(tmp_path / "none.jsonl")
    assert "does not exist" in missing.message and "regenerate RECIPE --heldout" in missing.remedy
    assert "holds no prompts" in refusal(write(tmp_path / "empty.jsonl", "")).message
    assert "cannot be read" in refusal(tmp_path).message
    long = refusal(write(tmp_path / "long.jsonl", ROW), pack_tokens=3)
    assert "has 4 tokens, a pack has data.pack_tokens = 3" in long.message
    single = ROW | {"source": "code", "input_ids": [4, 5], "loss_mask": [0, 1]}
    assert "no answer of source 'code'" in refusal(write(tmp_path / "single.jsonl", ROW, single)).message
    other = refusal(write(tmp_path / "other.jsonl", ROW, ROW | {"target_fingerprint": "g"}))
    assert other.reason is Reason.TARGET_FINGERPRINT_MISMATCH and "fingerprint g" in other.message
