"""Step ②: what the model wrote of tool calls and reasoning is supervised, and which answers are."""

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from slipstream.wire.data_report import Finding, ReportBuilder
from target_server.conversations import Conversation, TokenRow
from target_server.messages import Turn
from target_server.tokens_and_mask import ChatEncoder
from tests.unit.target_data.test_tokens_and_mask import encode_all, encode_one, is_verified, supervised_texts, talk

# In the manner of Qwen3: tools in the system turn, thinking only after the last question, results as user turns.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }} {% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant{{ '\n' }}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}"
    "{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' }}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}"
    "<|im_end|>{{ '\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content }}"
    "{{ '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL: dict[str, Any] = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOLS = ({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},)


@pytest.fixture
def thinker(chatml: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    chatml.chat_template = TEMPLATE
    return chatml


def with_tools(*, reasoning: str = "") -> Conversation:
    turns = (
        Turn("user", "Weather in Oslo?"),
        Turn("assistant", "", tool_calls=(CALL,), reasoning=reasoning),
        Turn("tool", '{"sky": "rain"}', name="weather", tool_call_id="c1"),
        Turn("assistant", "It rains."),
    )
    return Conversation("t", "f:1", turns, finished=True, tools=TOOLS)


def test_calls_are_supervised_and_results_are_not(thinker: PreTrainedTokenizerFast) -> None:
    encoder = ChatEncoder(thinker, 1024)
    document = encode_one(encoder, with_tools())
    call, answer = supervised_texts(thinker, document)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>' in call
    assert answer == "It rains.<|im_end|>"
    text = thinker.decode(document.token_ids)
    assert '"parameters"' in text and '<tool_response>\n{"sky": "rain"}' in text
    assert is_verified(encoder, with_tools())


def test_reasoning_is_supervised_with_its_tags(thinker: PreTrainedTokenizerFast) -> None:
    encoder, report = ChatEncoder(thinker, 1024), ReportBuilder()
    turns = (Turn("user", "2+2?"), Turn("assistant", "4", reasoning="Easy."))
    (document,) = encode_all(encoder, Conversation("t", "f:1", turns, finished=True), report)
    assert supervised_texts(thinker, document) == ["<think>\nEasy.\n</think>\n\n4<|im_end|>"]
    assert report.build("train").notes == ()
    (called,) = encode_all(encoder, with_tools(reasoning="I must look."), report)
    assert supervised_texts(thinker, called)[0].startswith("<think>\nI must look.\n</think>")


def test_reasoning_that_earlier_turns_lose_makes_one_row_per_answer(thinker: PreTrainedTokenizerFast) -> None:
    encoder = ChatEncoder(thinker, 1024)
    turns = (
        Turn("user", "2+2?"), Turn("assistant", "4", reasoning="Easy."),
        Turn("user", "3+3?"), Turn("assistant", "6", reasoning="Too."),
    )  # fmt: skip
    conversation = Conversation("t", "f:1", turns, finished=True)
    documents = encode_all(encoder, conversation, ReportBuilder())
    assert [supervised_texts(thinker, document) for document in documents] == [
        ["<think>\nEasy.\n</think>\n\n4<|im_end|>"],
        ["<think>\nToo.\n</think>\n\n6<|im_end|>"],
    ]
    assert "Easy" not in thinker.decode(documents[1].token_ids)
    assert is_verified(encoder, conversation)
    last = encode_one(ChatEncoder(thinker, 1024, train_turns="last"), conversation)
    assert (last.id, last.token_ids.tolist()) == ("t", documents[1].token_ids.tolist())


def test_a_template_that_knows_neither(chatml: PreTrainedTokenizerFast) -> None:
    encoder, report = ChatEncoder(chatml, 1024), ReportBuilder()
    assert encode_all(encoder, with_tools(), report) == []
    turns = (Turn("user", "2+2?"), Turn("assistant", "4", reasoning="Easy."))
    (document,) = encode_all(encoder, Conversation("t", "f:2", turns, finished=True), report)
    assert supervised_texts(chatml, document) == ["4<|im_end|>"]
    result = report.build("train")
    assert result.count(Finding.TOOLS_NOT_WRITTEN) == result.count(Finding.REASONING_NOT_WRITTEN) == 1


def test_a_call_that_the_template_loses_is_not_trained(thinker: PreTrainedTokenizerFast) -> None:
    thinker.chat_template = TEMPLATE.replace("call.function.name", "call.function.name | replace('weather', '?')")
    document = encode_one(ChatEncoder(thinker, 1024), with_tools())
    assert supervised_texts(thinker, document) == ["It rains.<|im_end|>"]


def test_only_the_last_answer(tokenizers: dict) -> None:
    tokenizer = tokenizers["llama3"]
    conversation = talk("Hi", "Hello", "And?", "Bye")
    everything = encode_one(ChatEncoder(tokenizer, 512), conversation)
    last = encode_one(ChatEncoder(tokenizer, 512, train_turns="last"), conversation)
    assert supervised_texts(tokenizer, last) == ["Bye<|eot_id|>"]
    assert np.array_equal(last.token_ids, everything.token_ids)


def test_answers_that_are_context_only(tokenizers: dict) -> None:
    tokenizer, report = tokenizers["chatml"], ReportBuilder()
    turns = (
        Turn("user", "a"), Turn("assistant", "b", trained=False), Turn("user", "c"), Turn("assistant", "d"),
    )  # fmt: skip
    encoder = ChatEncoder(tokenizer, 512)
    document = encode_one(encoder, Conversation("t", "f:1", turns, finished=True))
    assert supervised_texts(tokenizer, document) == ["d<|im_end|>"]
    assert encode_all(encoder, Conversation("t", "f:1", turns[:2], finished=True), report) == []
    assert report.build("train").count(Finding.NOTHING_TRAINED) == 1


def test_given_tokens_are_only_cut(tokenizers: dict) -> None:
    tokenizer = tokenizers["chatml"]
    ids = np.arange(6, dtype=np.int32)
    mask = np.array([0, 0, 1, 1, 0, 1], dtype=np.uint8)
    report = ReportBuilder()
    rows = [
        TokenRow("a", "f:1", ids, mask),
        TokenRow("b", "f:2", ids + len(tokenizer), mask),
        TokenRow("c", "f:3", ids[::-1].copy(), mask[::-1].copy() * 0),
        TokenRow("d", "f:4", ids, np.array([0, 0, 0, 0, 0, 1], dtype=np.uint8)),
        talk("Hi", "Hello"),
    ]
    encoded = list(ChatEncoder(tokenizer, 5).encode(rows, report))
    (first,) = encoded[0][1]
    assert (first.token_ids.tolist(), first.loss_mask.tolist()) == ([0, 1, 2, 3, 4], [0, 0, 1, 1, 0])
    assert [each.id for each, _ in encoded] == ["a"]
    result = report.build("train")
    assert [result.count(each) for each in (Finding.TRUNCATED, Finding.TOKEN_UNKNOWN, Finding.NOTHING_TRAINED)] == [
        *(1, 1, 1)
    ]
    assert result.count(Finding.ANSWERS_CUT_AWAY) == 2
