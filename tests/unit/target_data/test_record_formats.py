"""Step ①: layouts beyond a question and an answer: completions, tokens, tools, reasoning, weights."""

import json
from typing import Any

import numpy as np
import pytest

from slipstream.wire.data_report import Finding
from target_server.conversations import (
    Conversation,
    RecordFormat,
    TokenRow,
    parse_record,
)
from target_server.messages import BadRecordError, Turn

CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def parse(record: dict[str, Any], record_format: RecordFormat = "auto") -> Conversation:
    parsed = parse_record(record, record_format, "f.jsonl:1")
    assert isinstance(parsed, Conversation)
    assert parse_record(json.dumps(record).encode(), record_format, "f.jsonl:1") == parsed
    return parsed


def finding(record: dict[str, Any], record_format: RecordFormat = "auto") -> Finding:
    with pytest.raises(BadRecordError) as caught:
        parse_record(record, record_format, "f.jsonl:1")
    return caught.value.finding


def test_prompt_and_completion_as_text() -> None:
    conversation = parse({"prompt": "Hi", "completion": "Hello", "id": 4, "finished": False})
    assert conversation.turns == (Turn("user", "Hi"), Turn("assistant", "Hello"))
    assert (conversation.id, conversation.finished) == ("4", False)


def test_of_a_prompt_of_messages_only_the_completion_is_trained() -> None:
    prompt = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    record = {
        "prompt": [*prompt, {"role": "user", "content": "And?"}],
        "completion": [{"role": "assistant", "content": "Bye"}],
    }
    assert [turn.trained for turn in parse(record).turns] == [False, False, False, True]
    assert finding({"prompt": "Hi", "completion": " "}) is Finding.EMPTY_TURN
    assert finding({"prompt": "Hi"}) is Finding.NO_TURNS


def test_columns_that_are_empty_do_not_count() -> None:
    """A row of a table has every column."""
    record = {"messages": None, "conversations": None, "prompt": "Hi", "completion": "Hello", "input_ids": None}
    assert parse(record).turns[0] == Turn("user", "Hi")


def test_tool_calls_results_and_definitions() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    record = {
        "tools": tools,
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
            ]},
            {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": ""},
            {"role": "assistant", "content": "Rain."},
        ],
    }  # fmt: skip
    conversation = parse(record)
    assert conversation.tools == tuple(tools) and conversation.uses_tools
    assert conversation.turns == (
        Turn("system", "Be brief."),
        Turn("user", "Weather?"),
        Turn("assistant", "", tool_calls=(CALL,)),
        Turn("tool", "", name="weather", tool_call_id="c1"),
        Turn("assistant", "Rain."),
    )
    assert parse(record | {"tools": json.dumps(tools)}) == conversation


def test_other_ways_to_write_a_call() -> None:
    user = {"role": "user", "content": "Weather?"}
    for message in (
        {"role": "assistant", "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]},
    ):
        (call,) = parse({"messages": [user, message]}).turns[1].tool_calls
        assert call["function"] == CALL["function"]
    sharegpt = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "Rain."},
    ]
    conversation = parse({"system": "Be brief.", "conversations": sharegpt})
    assert [turn.role for turn in conversation.turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert conversation.turns[2].tool_calls[0]["function"] == CALL["function"]


@pytest.mark.parametrize("calls", [[{}], ["weather"], 3, [{"function": {"name": ""}}], [{"function": {"name": 1}}]])
def test_calls_that_are_none(calls: object) -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": calls}
    assert finding({"messages": [{"role": "user", "content": "Hi"}, message]}) is Finding.UNSUPPORTED_CONTENT


def test_values_that_are_no_json_are_refused() -> None:
    user = {"role": "user", "content": "Hi"}
    message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": b"\x00"}}]}
    assert finding({"messages": [user, message]}) is Finding.UNSUPPORTED_CONTENT
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"a": nested}
    message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": nested}]}
    assert finding({"messages": [user, message]}) is Finding.UNSUPPORTED_CONTENT


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_any_of_its_names(key: str) -> None:
    message = {"role": "assistant", "content": "4", key: "2 + 2"}
    turn = parse({"messages": [{"role": "user", "content": "?"}, message]}).turns[1]
    assert turn.reasoning == "2 + 2" and turn.message()["reasoning_content"] == "2 + 2"


def test_answers_of_no_weight_are_context() -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": 0},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "weight": 1},
    ]
    assert [turn.trained for turn in parse({"messages": turns}).turns] == [True, False, True, True]


def tokens(**record: Any) -> TokenRow:
    parsed = parse_record(record, "auto", "f.jsonl:9")
    assert isinstance(parsed, TokenRow)
    return parsed


def test_tokens_with_a_mask_or_with_labels() -> None:
    row = tokens(input_ids=[5, 6, 7], loss_mask=[0, 1, 1])
    assert (row.id, row.token_ids.tolist(), row.loss_mask.tolist()) == ("f.jsonl:9", [5, 6, 7], [0, 1, 1])
    assert (row.token_ids.dtype, row.loss_mask.dtype) == (np.int32, np.uint8)
    labelled = tokens(input_ids=[5, 6, 7], labels=[-100, 6, 7], id="x")
    assert (labelled.id, labelled.loss_mask.tolist()) == ("x", [0, 1, 1])


@pytest.mark.parametrize(
    "record",
    [
        {"input_ids": [1, 2]},
        {"input_ids": [1, 2], "loss_mask": [1]},
        {"input_ids": [], "loss_mask": []},
        {"input_ids": [1, 2.5], "loss_mask": [1, 1]},
        {"input_ids": [1, "2"], "loss_mask": [1, 1]},
        {"input_ids": [1, None], "loss_mask": [1, 1]},
        {"input_ids": [[1], [2, 3]], "loss_mask": [1, 1]},
        {"input_ids": [1, 2], "loss_mask": [1, 2]},
        {"input_ids": [True, False], "loss_mask": [1, 1]},
        {"input_ids": [1, -2], "loss_mask": [1, 1]},
        {"input_ids": [1, 2**31], "loss_mask": [1, 1]},
        {"input_ids": [1, 2**70], "loss_mask": [1, 1]},
        {"input_ids": "12", "loss_mask": "11"},
    ],
)
def test_tokens_that_are_none(record: dict[str, Any]) -> None:
    assert finding(record) is Finding.TOKENS_INVALID


def test_a_layout_that_is_named_is_the_only_one() -> None:
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert parse(record, "openai").turns[1].content == "b"
    assert finding(record, "sharegpt") is Finding.NO_TURNS
    assert finding(record, "completion") is Finding.EMPTY_TURN
    assert finding(record, "tokens") is Finding.TOKENS_INVALID
