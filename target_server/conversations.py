"""① Second half: a record becomes a conversation, or tokens that were made elsewhere, or a refusal.

Layouts, told apart record by record unless the recipe names one:
`openai` {"messages": [{"role", "content"}], "tools"}, `sharegpt` {"conversations": [{"from", "value"}]},
`completion` {"prompt", "completion"} (text, or lists of messages), `tokens` {"input_ids", "loss_mask" or "labels"}.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from slipstream.wire.data_report import Finding

RecordFormat = Literal["auto", "openai", "sharegpt", "completion", "tokens"]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_SHAREGPT_ROLES = {
    **_ROLES,
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_IGNORED_LABEL = -100


@dataclass(frozen=True)
class Turn:
    """One message. `content` holds more than white space, except beside tool calls and in a tool's result."""

    role: str
    """system, user, assistant or tool."""
    content: str
    reasoning: str = ""
    """What the assistant thought before it answered."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """As {"type": "function", "id"?, "function": {"name", "arguments"}}; arguments as an object where they are one."""
    name: str = ""
    """Of the tool whose result this is."""
    tool_call_id: str = ""
    trained: bool = True
    """False for an answer that is context only."""

    def message(self) -> dict[str, Any]:
        """What chat templates take."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            # Templates disagree on the name.
            message |= {"reasoning_content": self.reasoning, "thinking": self.reasoning}
        if self.tool_calls:
            message["tool_calls"] = [dict(call) for call in self.tool_calls]
        if self.name:
            message["name"] = self.name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


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


class BadRecordError(Exception):
    """A record that gives no conversation; `finding` says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.value)
        self.finding = finding


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
        tools=_parse_tools(record.get("tools")),
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
    return Prompt(_conversation_id(record, where), tuple(turns), _parse_tools(record.get("tools")))


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
    return _valid_unicode(given) if isinstance(given, str) and given else where


def _openai_turns(record: Mapping[str, Any]) -> list[Turn]:
    return [_parse_message(entry) for entry in _entries(record.get("messages"))]


def _sharegpt_turns(record: Mapping[str, Any]) -> list[Turn]:
    turns = []
    system = record.get("system")
    if isinstance(system, str) and system.strip():
        turns.append(Turn("system", _valid_unicode(system)))
    for entry in _entries(record.get("conversations")):
        if "from" not in entry and "role" in entry:  # both mixtures exist
            turns.append(_parse_message(entry))
            continue
        role = _role_of(entry.get("from"), _SHAREGPT_ROLES)
        value = entry.get("value")
        if entry.get("from") == "function_call":
            turns.append(Turn(role, "", tool_calls=_parse_calls(_json_or(value), None)))
            continue
        turns.append(Turn(role, _parse_content(value, may_be_empty=role == "tool"), trained=_is_trained(entry)))
    return turns


def _completion_turns(record: Mapping[str, Any]) -> list[Turn]:
    """Only the completion is trained, also where the prompt holds earlier answers."""
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list):
        before = [replace(turn, trained=False) for turn in _openai_turns({"messages": prompt})]
    else:
        before = [Turn("user", _parse_content(prompt))]
    if isinstance(completion, list):
        return before + _openai_turns({"messages": completion})
    return [*before, Turn("assistant", _parse_content(completion))]


_PARSERS = {"openai": _openai_turns, "sharegpt": _sharegpt_turns, "completion": _completion_turns}


def _entries(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        raise BadRecordError(Finding.NO_TURNS)
    return value


def _role_of(role: object, roles: Mapping[str, str]) -> str:
    if not isinstance(role, str) or role not in roles:
        raise BadRecordError(Finding.UNKNOWN_ROLE)
    return roles[role]


def _parse_message(entry: Mapping[str, Any]) -> Turn:
    role = _role_of(entry.get("role"), _ROLES)
    calls = _parse_calls(entry.get("tool_calls"), entry.get("function_call"))
    if calls and role != "assistant":
        raise BadRecordError(Finding.UNSUPPORTED_CONTENT)
    return Turn(
        role,
        _parse_content(entry.get("content"), may_be_empty=bool(calls) or role == "tool"),
        reasoning=_parse_reasoning(entry) if role == "assistant" else "",
        tool_calls=calls,
        name=_optional_text(entry.get("name")) if role == "tool" else "",
        tool_call_id=_optional_text(entry.get("tool_call_id")),
        trained=_is_trained(entry),
    )


def _is_trained(entry: Mapping[str, Any]) -> bool:
    """OpenAI's fine-tuning files mark answers that are context only with `"weight": 0`."""
    return entry.get("weight") != 0 or isinstance(entry.get("weight"), bool)


def _parse_reasoning(entry: Mapping[str, Any]) -> str:
    for key in _REASONING_KEYS:
        value = entry.get(key)
        if isinstance(value, str) and value.strip():
            return _valid_unicode(value)
    return ""


def _optional_text(value: object) -> str:
    return _valid_unicode(value) if isinstance(value, str) else ""


def _parse_content(content: object, *, may_be_empty: bool = False) -> str:
    if content is None:
        content = ""
    if isinstance(content, list):
        content = "".join(_parse_part(part) for part in content)
    if not isinstance(content, str):
        raise BadRecordError(Finding.UNSUPPORTED_CONTENT)
    if not content.strip() and not may_be_empty:
        raise BadRecordError(Finding.EMPTY_TURN)
    return _valid_unicode(content)


def _parse_part(part: object) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return cast(str, part["text"])
    raise BadRecordError(Finding.UNSUPPORTED_CONTENT)


def _parse_calls(calls: object, single: object) -> tuple[Mapping[str, Any], ...]:
    """Tool calls of a message: OpenAI's list, its older `function_call`, or bare {"name", "arguments"} objects."""
    if not calls:
        calls = [single] if single else []
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise BadRecordError(Finding.UNSUPPORTED_CONTENT)
    return tuple(_parse_call(call) for call in calls)


def _parse_call(call: object) -> Mapping[str, Any]:
    if not isinstance(call, dict):
        raise BadRecordError(Finding.UNSUPPORTED_CONTENT)
    function = call.get("function") if isinstance(call.get("function"), dict) else call
    assert function is not None
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRecordError(Finding.UNSUPPORTED_CONTENT)
    # OpenAI writes arguments as JSON text; templates want the object, and would quote the text once more.
    arguments = _json_or(function.get("arguments") or {})
    parsed = {"type": "function", "function": {"name": name, "arguments": arguments}}
    _check_json(parsed)
    identity = call.get("id")
    return parsed | {"id": _valid_unicode(identity)} if isinstance(identity, str) and identity else parsed


def _parse_tools(tools: object) -> tuple[Mapping[str, Any], ...]:
    tools = _json_or(tools)
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecordError(Finding.UNSUPPORTED_CONTENT)
    _check_json(tools)
    return tuple(tools)


def _check_json(value: object) -> None:
    """What a template will write must be text that a tokenizer takes."""
    try:
        _valid_unicode(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):  # columns of other types; nested thousands deep
        raise BadRecordError(Finding.UNSUPPORTED_CONTENT) from None


def _json_or(value: object) -> object:
    """JSON text as its value; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict | list) else value


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


def _valid_unicode(text: str) -> str:
    r"""JSON escapes can smuggle in half a surrogate pair (`\ud83d`), which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecordError(Finding.NOT_UTF8) from None
    return text
