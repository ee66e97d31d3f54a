"""Files as people have them: whatever is odd is a line in the report, with its place, in `inspect` and in the index."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.run_spec.spec import DataSpec
from slipstream.wire.data_report import DataReport, Finding
from target_server.conversations import Conversation, parse_record
from target_server.data_files import find_files
from target_server.dataset import load_documents
from target_server.inspection import inspect_files


def talk(name: str, *roles: str, **changes: Any) -> bytes:
    messages = [{"role": role, "content": f"words of {role}"} for role in roles or ("user", "assistant")]
    return json.dumps({"id": name, "messages": messages, **changes}).encode()


def answer(content: object) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]}
    ).encode()


GOOD = talk("good")
SHAREGPT = b'{"id": "s", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}'
PLAIN = b'{"id": "p", "prompt": "Hi", "completion": "Hello"}'
IMAGE = answer([{"type": "image_url", "image_url": {"url": "x"}}])

CASES: dict[str, tuple[str, bytes, Finding, str, int]] = {
    "a byte order mark": ("f.jsonl", b"\xef\xbb\xbf" + GOOD, Finding.BYTE_ORDER_MARK, "f.jsonl:1", 1),
    "CRLF": ("f.jsonl", GOOD + b"\r\n" + talk("b") + b"\r\n", Finding.CRLF_LINES, "f.jsonl:1", 2),
    "an empty file": ("f.jsonl", b"", Finding.EMPTY_FILE, "f.jsonl", 0),
    "lines in .parquet": ("f.parquet", GOOD, Finding.WRONG_SUFFIX, "f.parquet", 1),
    "lines in .txt": ("f.txt", GOOD, Finding.WRONG_SUFFIX, "f.txt", 1),
    "an array in .jsonl": ("f.jsonl", b"[" + GOOD + b"]", Finding.WRONG_SUFFIX, "f.jsonl", 1),
    "an id twice": ("f.jsonl", GOOD + b"\n" + GOOD, Finding.DUPLICATE_ID, "f.jsonl:2", 2),
    "two questions": ("f.jsonl", talk("a", "user", "user", "assistant"), Finding.ROLES_OUT_OF_ORDER, "f.jsonl:1", 1),
    "a late system turn": (
        *("f.jsonl", talk("a", "user", "system", "assistant"), Finding.ROLES_OUT_OF_ORDER, "f.jsonl:1", 1),
    ),
    "the answer first": ("f.jsonl", talk("a", "assistant", "user"), Finding.ANSWER_FIRST, "f.jsonl:1", 0),
    "an unknown role": ("f.jsonl", talk("a", "wizard", "assistant"), Finding.UNKNOWN_ROLE, "f.jsonl:1", 0),
    "null content": ("f.jsonl", answer(None), Finding.EMPTY_TURN, "f.jsonl:1", 0),
    "an image": ("f.jsonl", GOOD + b"\n" + IMAGE, Finding.UNSUPPORTED_CONTENT, "f.jsonl:2", 1),
    "three layouts": ("f.jsonl", b"\n".join([b"oops", GOOD, SHAREGPT, PLAIN]), Finding.OTHER_LAYOUT, "f.jsonl:3", 3),
    "an end of turn in an answer": (
        *("f.jsonl", GOOD + b"\n" + answer("a<|im_end|>b"), Finding.SPECIAL_TOKEN_IN_ANSWER, "f.jsonl:2", 2),
    ),
    "half a line": ("f.jsonl", GOOD + b"\n" + GOOD[:-5], Finding.BROKEN_JSON, "f.jsonl:2", 1),
    "another encoding": ("f.jsonl", GOOD.decode().encode("utf-16"), Finding.NOT_UTF8, "f.jsonl:1", 0),
    "a line beyond the limit": (
        *("f.jsonl", b"\n".join([GOOD, answer("x" * 5000), talk("b")]), Finding.LINE_TOO_LONG, "f.jsonl:2", 2),
    ),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("command", ["inspect", "index"])
def test_what_is_odd_is_a_line_in_the_report(
    tmp_path: Path, tokenizers: dict, monkeypatch: pytest.MonkeyPatch, case: str, command: str
) -> None:
    monkeypatch.setattr("target_server.record_files.MAX_RECORD_BYTES", 4096)
    monkeypatch.setenv("SLIPSTREAM_INDEX_DIR", str(tmp_path / "index"))
    name, content, finding, where, used = CASES[case]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "usable.jsonl").write_bytes(talk("usable"))
    data = DataSpec(files=(str(tmp_path / name), str(tmp_path / "usable.jsonl")), pack_tokens=256)
    files, tokenizer = find_files(data.files, None), tokenizers["chatml"]
    report: DataReport
    if command == "index":
        report = load_documents(data, tokenizer, files=files, split="train").report
    else:
        report = inspect_files(data, files, tokenizer, model="m", limit=100, document=1).report
    (found,) = [entry for entry in (*report.dropped, *report.notes) if entry.finding is finding]
    assert found.examples[0] == where
    assert report.used == used + 1, "what can be used is used, and one odd file keeps no other from being read"
    assert any(where in line and found.in_words() in line for line in report.summary_lines())


@pytest.mark.parametrize("layout", ["lines", "array"])
def test_what_comes_before_the_damage_is_read_as_what_it_is(tmp_path: Path, tokenizers: dict, layout: str) -> None:
    whole = {"lines": (".jsonl.gz", GOOD + b"\n"), "array": (".json.gz", b"[" + GOOD + b"]")}
    suffix, content = whole[layout]
    file = tmp_path / f"f{suffix}"
    file.write_bytes(gzip.compress(content)[:-8] + bytes(8))  # checksum and length of something else
    files = find_files((str(file),), None)
    data = DataSpec(files=(str(file),), pack_tokens=256)
    report = inspect_files(data, files, tokenizers["chatml"], model="m", limit=100, document=1).report
    assert report.used == 1
    assert [(entry.finding, entry.count) for entry in (*report.dropped, *report.notes)] == [(Finding.DAMAGED_GZIP, 1)]


@pytest.mark.parametrize(
    ("roles", "alternate"),
    [
        (("system", "user", "assistant"), True),
        (("user", "assistant", "tool", "tool", "assistant", "user", "assistant"), True),
        (("user", "assistant", "assistant"), False),
        (("system", "system", "user", "assistant"), False),
    ],
)
def test_who_may_speak_after_whom(roles: tuple[str, ...], alternate: bool) -> None:
    parsed = parse_record(talk("a", *roles), "auto", "f.jsonl:1")
    assert isinstance(parsed, Conversation) and parsed.roles_alternate is alternate
