"""Step ①: which lines become conversations, and what is said about the others."""

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.data_report import MAX_EXAMPLES, Finding, ReportBuilder
from target_server.conversations import Conversation, RecordFormat, parse_record
from target_server.messages import BadRecordError, Turn
from target_server.record_files import Position, SourceFile, read_records

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def read(path: Path, record_format: RecordFormat = "auto") -> tuple[list, ReportBuilder]:
    """Every conversation or token row of a file, and the account of its records."""
    report, found = ReportBuilder(), []
    file = SourceFile(path, path.name)
    for record in read_records(file, Position()):
        report.read += 1
        where = f"{file.printable_name}:{record.position.record}"
        try:
            found.append(parse_record(record.content, record_format, where))
        except BadRecordError as bad:
            report.drop(bad.finding, where)
    return found, report


def read_line(tmp_path: Path, line: bytes | dict, record_format: RecordFormat = "auto") -> tuple[list, ReportBuilder]:
    path = tmp_path / "line.jsonl"
    path.write_bytes(line if isinstance(line, bytes) else json.dumps(line).encode())
    return read(path, record_format)


def test_openai_and_sharegpt_lines_in_one_file(tmp_path: Path) -> None:
    sharegpt = {
        "id": 7,
        "finished": False,
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello"},
        ],
    }
    path = tmp_path / "mixed.jsonl"
    path.write_text("\ufeff" + json.dumps({**GOOD, "id": "a"}) + "\n\n" + json.dumps(sharegpt) + "\n", encoding="utf-8")
    conversations, report = read(path)
    first = Conversation("a", "mixed.jsonl:1", (Turn("user", "Hi"), Turn("assistant", "Hello")), finished=True)
    turns = (Turn("system", "Be brief."), Turn("user", "Hi"), Turn("assistant", "Hello"))
    assert conversations == [first, Conversation("7", "mixed.jsonl:3", turns, False, layout="sharegpt")]
    assert (report.read, report.num_dropped) == (2, 0)


def test_gzip_is_told_by_its_bytes_and_ids_default_to_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(gzip.compress(b"\n".join(json.dumps(GOOD).encode() for _ in range(3))))
    conversations, _ = read(path)
    assert [conversation.id for conversation in conversations] == ["data.bin:1", "data.bin:2", "data.bin:3"]


def test_a_file_name_that_is_not_utf8_gives_printable_ids(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    path.write_text(json.dumps(GOOD) + "\noops\n")
    (conversation,), report = read(path)
    assert conversation.id == "caf\\udce9.jsonl:1"
    assert "caf\\\\udce9.jsonl:2" in report.build("train").model_dump_json()


def test_text_parts_are_joined_and_turns_after_the_last_answer_left_out(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    turns = [GOOD["messages"][0], {"role": "assistant", "content": parts}, {"role": "user", "content": "Bye"}]
    (conversation,), _ = read_line(tmp_path, {"messages": turns})
    assert conversation.turns == (Turn("user", "Hi"), Turn("assistant", "Hello"))


def _messages(*turns: object) -> dict:
    return {"messages": list(turns)}


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        (b'{"messages": [', Finding.BROKEN_JSON),
        (b"[" * 100_000, Finding.BROKEN_JSON),
        (b'{"id": ' + b"9" * 5000 + b"}", Finding.BROKEN_JSON),
        (b'{"messages": "\xff"}', Finding.NOT_UTF8),
        (rb'{"messages": [{"role": "user", "content": "\ud83d"}]}', Finding.NOT_UTF8),
        (rb'{"id": "\udc00", "messages": [{"role": "assistant", "content": "a"}]}', Finding.NOT_UTF8),
        (b'["messages"]', Finding.NOT_AN_OBJECT),
        (b"null", Finding.NOT_AN_OBJECT),
        ({}, Finding.NO_TURNS),
        (_messages(), Finding.NO_TURNS),
        ({"messages": {"role": "user"}}, Finding.NO_TURNS),
        (_messages("Hi"), Finding.NO_TURNS),
        (_messages(USER, {"role": "assistant", "content": " \n"}), Finding.EMPTY_TURN),
        (_messages(USER, {"role": "assistant", "content": []}), Finding.EMPTY_TURN),
        (_messages(USER, {"role": "assistant"}), Finding.EMPTY_TURN),
        (_messages({"role": "critic", "content": "42"}), Finding.UNKNOWN_ROLE),
        (_messages({"role": "tool", "content": "42"}), Finding.NO_ASSISTANT_TURN),
        (_messages({"role": ["user"], "content": "Hi"}), Finding.UNKNOWN_ROLE),
        (_messages({"content": "Hi"}), Finding.UNKNOWN_ROLE),
        (_messages({"role": "user", "content": [{"type": "image_url"}]}), Finding.UNSUPPORTED_CONTENT),
        (_messages({"role": "user", "content": 3}), Finding.UNSUPPORTED_CONTENT),
        (_messages({"role": "assistant", "content": "a", "tool_calls": [{}]}), Finding.UNSUPPORTED_CONTENT),
        (_messages(USER), Finding.NO_ASSISTANT_TURN),
    ],
)
def test_a_bad_line_is_dropped_and_the_next_one_used(tmp_path: Path, line: bytes | dict, finding: Finding) -> None:
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    path = tmp_path / "bad.jsonl"
    path.write_bytes(raw + b"\n" + json.dumps(GOOD).encode() + b"\n")
    conversations, report = read(path)
    assert [conversation.where for conversation in conversations] == ["bad.jsonl:2"]
    (entry,) = report.build("train").dropped
    assert (entry.finding, entry.count, entry.examples) == (finding, 1, ("bad.jsonl:1",))


def test_a_fixed_format_does_not_accept_the_other(tmp_path: Path) -> None:
    _, report = read_line(tmp_path, GOOD, "sharegpt")
    assert report.build("train").count(Finding.NO_TURNS) == 1


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_gzip_keeps_what_came_before(tmp_path: Path, damage: str) -> None:
    lines = b"".join(json.dumps({**GOOD, "id": f"line {n} {n * 7919 % 1009}"}).encode() + b"\n" for n in range(2000))
    packed = bytearray(gzip.compress(lines))
    middle = len(packed) // 2
    if damage == "cut":
        del packed[middle:]
    else:
        packed[middle : middle + 64] = b"\xff" * 64
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(packed)
    conversations, report = read(path)
    result = report.build("train")
    assert 0 < len(conversations) < 2000
    assert result.count(Finding.DAMAGED_GZIP) == 1
    assert report.read == len(conversations) + report.num_dropped


def test_only_the_first_examples_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("oops\n" * 20)
    _, report = read(path)
    (entry,) = report.build("train").dropped
    assert entry.count == 20
    assert entry.examples == tuple(f"many.jsonl:{line}" for line in range(1, MAX_EXAMPLES + 1))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "messages", "text", "type"]), inner)
    ),
    max_leaves=8,
)
records = st.dictionaries(st.sampled_from(["id", "messages", "conversations", "finished"]), json_values)


@settings(max_examples=40, deadline=None)
@example(lines=[b"PAR1"])
@example(lines=[b"PAR1", b"", b"PAR1"])
@example(lines=[b"ARROW1"])
@example(lines=[b"\xff\xff\xff\xff\xff"])
@example(lines=[b"\x1f\x8b"])
@example(lines=[b"\xfd7zXZ\x00"])
@given(lines=st.lists(st.binary(max_size=30) | records.map(lambda record: json.dumps(record).encode()), max_size=8))
def test_no_input_aborts_and_every_line_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "fuzz.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        conversations, report = read(path)
    except SlipstreamError as refused:
        # By its first bytes it is compressed in a way that is not read.
        assert refused.reason is Reason.DATA_INVALID and refused.remedy.startswith("Decompress it")
        return
    assert report.read == len(conversations) + report.num_dropped
    assert all(turn.content.strip() for conversation in conversations for turn in conversation.turns)
    assert all(conversation.turns[-1].role == "assistant" for conversation in conversations)
