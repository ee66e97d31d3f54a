"""① Second half: a record becomes a conversation, or tokens that were made elsewhere, or a refusal.

Layouts, told apart record by record unless the recipe names one:
`openai` {"messages": [{"role", "content"}], "tools"}, `sharegpt` {"conversations": [{"from", "value"}]},
`completion` {"prompt", "completion"} (text, or lists of messages), `tokens` {"input_ids", "loss_mask" or "labels"}.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slipstream.wire.data_report import Finding
from target_server.messages import (
    ROLES,
    BadRecordError,
    Turn,
    is_trained,
    json_or,
    parse_calls,
    parse_content,
    parse_message,
    parse_tools,
    role_of,
    valid_unicode,
)

RecordFormat = Literal["auto", "openai", "sharegpt", "completion", "tokens"]

_SHAREGPT_ROLES = {
    **ROLES,
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
_IGNORED_LABEL = -100


@dataclass(frozen=True)
class Conversation:
    """Turns up to the last answer; what a user said after it teaches nothing and is left out."""

    id: str
    """The record's `id`, else file name and number."""
    where: str
    """`file.jsonl:17`, for reports."""
    turns: tuple[Turn, ...]
    finished: bool
    """False where the last answer was cut off: no end of turn belongs after it."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Definitions of the tools that the assistant may call, as JSON schemas."""
    layout: RecordFormat = "openai"

    @property
    def roles_alternate(self) -> bool:
        """A system turn at most at the beginning, and nobody but tools speaks twice in a row."""
        roles = [turn.role for turn in self.turns]
        repeats = (first for first, second in itertools.pairwise(roles) if first == second)
        return "system" not in roles[1:] and all(role == "tool" for role in repeats)

    @property
    def uses_tools(self) -> bool:
        """Whether the template has to know about tools."""
        return bool(self.tools) or any(turn.role == "tool" or turn.tool_calls for turn in self.turns)


@dataclass(frozen=True)
class TokenRow:
    """A record that is tokens already; no template is applied and nothing is added."""

    id: str
    where: str
    token_ids: npt.NDArray[np.int32]
    """[L]"""
    loss_mask: npt.NDArray[np.uint8]
    """[L], 1 on supervised tokens."""
    layout: RecordFormat = "tokens"


@dataclass(frozen=True)
class Prompt:
    """A conversation up to where the assistant is to answer."""

    id: str
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def parse_record(content: object, record_format: RecordFormat, where: str) -> Conversation | TokenRow:
    """A conversation from JSON text, or from a value that was parsed already.

    Args:
        content: what `record_files.Record` holds.
        record_format: the layout; auto looks at the record's keys.
        where: `file:number`; becomes the id of a record that has none.

    Raises:
        BadRecordError: the record cannot be used.
    """
    record = _object(content)
    name = _conversation_id(record, where)
    layout = _layout_of(record) if record_format == "auto" else record_format
    if layout == "tokens":
        return TokenRow(name, where, *_parse_tokens(record))
    turns = _PARSERS[layout](record)
    last_answer = max((index for index, turn in enumerate(turns) if turn.role == "assistant"), default=None)
    if last_answer is None:
        raise BadRecordError(Finding.NO_ASSISTANT_TURN)
    return Conversation(
        id=name,
        where=where,
        turns=tuple(turns[: last_answer + 1]),
        finished=record.get("finished") is not False,
        tools=parse_tools(record.get("tools")),
        layout=layout,
    )


def parse_prompt(content: object, record_format: RecordFormat, where: str) -> Prompt:
    """The turns before a record's last answer; a record needs no answer. Arguments and errors as of `parse_record`."""
    record = _object(content)
    turns: list[Turn]
    if record_format in ("auto", "completion") and record.get("prompt") is not None:
        turns = _completion_turns({**record, "completion": "?"})
    else:
        layout = _layout_of(record) if record_format == "auto" else record_format
        if layout == "tokens":
            raise BadRecordError(Finding.NO_TURNS)
        turns = _PARSERS[layout](record)
    while turns and turns[-1].role == "assistant":
        turns.pop()
    if not turns:
        raise BadRecordError(Finding.ANSWER_FIRST)
    return Prompt(_conversation_id(record, where), tuple(turns), parse_tools(record.get("tools")))


def layout_of(content: object) -> RecordFormat:
    """A record's layout. Argument and errors as of `parse_record`."""
    return _layout_of(_object(content))


def _object(content: object) -> dict[str, Any]:
    if isinstance(content, Finding):
        raise BadRecordError(content)
    record = _loads(content) if isinstance(content, bytes) else content
    if not isinstance(record, dict):
        raise BadRecordError(Finding.NOT_AN_OBJECT)
    return record


def _loads(text: bytes) -> object:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadRecordError(Finding.NOT_UTF8) from None
    except (ValueError, RecursionError):  # RecursionError: brackets nested thousands deep
        raise BadRecordError(Finding.BROKEN_JSON) from None


def _layout_of(record: Mapping[str, Any]) -> RecordFormat:
    """By the first of these keys that has a value: rows of tables have every column, some of them empty."""
    layouts: tuple[tuple[str, RecordFormat], ...] = (
        ("messages", "openai"),
        ("conversations", "sharegpt"),
        ("completion", "completion"),
        ("input_ids", "tokens"),
    )
    for key, layout in layouts:
        if record.get(key) is not None:
            return layout
    raise BadRecordError(Finding.NO_TURNS)


def _conversation_id(record: Mapping[str, Any], where: str) -> str:
    given = record.get("id")
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    return valid_unicode(given) if isinstance(given, str) and given else where


def _openai_turns(record: Mapping[str, Any]) -> list[Turn]:
    return [parse_message(entry) for entry in _entries(record.get("messages"))]


def _sharegpt_turns(record: Mapping[str, Any]) -> list[Turn]:
    turns = []
    system = record.get("system")
    if isinstance(system, str) and system.strip():
        turns.append(Turn("system", valid_unicode(system)))
    for entry in _entries(record.get("conversations")):
        if "from" not in entry and "role" in entry:  # both mixtures exist
            turns.append(parse_message(entry))
            continue
        role = role_of(entry.get("from"), _SHAREGPT_ROLES)
        value = entry.get("value")
        if entry.get("from") == "function_call":
            turns.append(Turn(role, "", tool_calls=parse_calls(json_or(value), None)))
            continue
        turns.append(Turn(role, parse_content(value, may_be_empty=role == "tool"), trained=is_trained(entry)))
    return turns


def _completion_turns(record: Mapping[str, Any]) -> list[Turn]:
    """Only the completion is trained, also where the prompt holds earlier answers."""
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list):
        before = [replace(turn, trained=False) for turn in _openai_turns({"messages": prompt})]
    else:
        before = [Turn("user", parse_content(prompt))]
    if isinstance(completion, list):
        return before + _openai_turns({"messages": completion})
    return [*before, Turn("assistant", parse_content(completion))]


_PARSERS = {"openai": _openai_turns, "sharegpt": _sharegpt_turns, "completion": _completion_turns}


def _entries(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        raise BadRecordError(Finding.NO_TURNS)
    return value


def _parse_tokens(record: Mapping[str, Any]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    ids, labels = record.get("input_ids"), record.get("labels")
    token_ids = _integers(ids)
    mask = _integers(record.get("loss_mask")) if labels is None else _integers(labels) != _IGNORED_LABEL
    fits = len(token_ids) == len(mask) > 0 and token_ids.min() >= 0 and token_ids.max() < 2**31
    if not fits or not np.isin(mask, (0, 1)).all():
        raise BadRecordError(Finding.TOKENS_INVALID)
    return token_ids.astype(np.int32), mask.astype(np.uint8)


def _integers(values: object) -> npt.NDArray[np.int64]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise BadRecordError(Finding.TOKENS_INVALID)
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths, numbers beyond 64 bits
        raise BadRecordError(Finding.TOKENS_INVALID) from None
    if array.ndim != 1 or array.dtype.kind != "i":
        raise BadRecordError(Finding.TOKENS_INVALID)
    return array.astype(np.int64)
