"""① One message of a record becomes a turn: its role, its text, what the assistant thought, tools and their results.

Every chat layout has messages like OpenAI's in it somewhere; what cannot be one is refused with a reason.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from slipstream.wire.data_report import Finding

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


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


class BadRecordError(Exception):
    """A record that gives no conversation; `finding` says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.value)
        self.finding = finding


def parse_message(entry: Mapping[str, Any]) -> Turn:
    """A turn from {"role", "content"} and what else OpenAI's messages have.

    Raises:
        BadRecordError: an unknown role, or content that is not text.
    """
    role = role_of(entry.get("role"), ROLES)
    calls = parse_calls(entry.get("tool_calls"), entry.get("function_call"))
    if calls and role != "assistant":
        raise BadRecordError(Finding.UNSUPPORTED_CONTENT)
    return Turn(
        role,
        parse_content(entry.get("content"), may_be_empty=bool(calls) or role == "tool"),
        reasoning=_parse_reasoning(entry) if role == "assistant" else "",
        tool_calls=calls,
        name=_optional_text(entry.get("name")) if role == "tool" else "",
        tool_call_id=_optional_text(entry.get("tool_call_id")),
        trained=is_trained(entry),
    )


def role_of(role: object, roles: Mapping[str, str]) -> str:
    """Ours for one of a layout. Raises BadRecordError for one that is unknown."""
    if not isinstance(role, str) or role not in roles:
        raise BadRecordError(Finding.UNKNOWN_ROLE)
    return roles[role]


def is_trained(entry: Mapping[str, Any]) -> bool:
    """OpenAI's fine-tuning files mark answers that are context only with `"weight": 0`."""
    return entry.get("weight") != 0 or isinstance(entry.get("weight"), bool)


def _parse_reasoning(entry: Mapping[str, Any]) -> str:
    for key in _REASONING_KEYS:
        value = entry.get(key)
        if isinstance(value, str) and value.strip():
            return valid_unicode(value)
    return ""


def _optional_text(value: object) -> str:
    return valid_unicode(value) if isinstance(value, str) else ""


def parse_content(content: object, *, may_be_empty: bool = False) -> str:
    """Text, or a list of text parts. Raises BadRecordError for anything else, and for nothing but white space."""
    if content is None:
        content = ""
    if isinstance(content, list):
        content = "".join(_parse_part(part) for part in content)
    if not isinstance(content, str):
        raise BadRecordError(Finding.UNSUPPORTED_CONTENT)
    if not content.strip() and not may_be_empty:
        raise BadRecordError(Finding.EMPTY_TURN)
    return valid_unicode(content)


def _parse_part(part: object) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return cast(str, part["text"])
    raise BadRecordError(Finding.UNSUPPORTED_CONTENT)


def parse_calls(calls: object, single: object) -> tuple[Mapping[str, Any], ...]:
    """Tool calls of a message: OpenAI's list, its older `function_call`, or bare {"name", "arguments"} objects.

    Raises:
        BadRecordError: what is none of these.
    """
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
    arguments = json_or(function.get("arguments") or {})
    parsed = {"type": "function", "function": {"name": name, "arguments": arguments}}
    _check_json(parsed)
    identity = call.get("id")
    return parsed | {"id": valid_unicode(identity)} if isinstance(identity, str) and identity else parsed


def parse_tools(tools: object) -> tuple[Mapping[str, Any], ...]:
    """Definitions of tools: a list of objects, or JSON text of one. Raises BadRecordError for anything else."""
    tools = json_or(tools)
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecordError(Finding.UNSUPPORTED_CONTENT)
    _check_json(tools)
    return tuple(tools)


def _check_json(value: object) -> None:
    """What a template will write must be text that a tokenizer takes."""
    try:
        valid_unicode(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):  # columns of other types; nested thousands deep
        raise BadRecordError(Finding.UNSUPPORTED_CONTENT) from None


def json_or(value: object) -> object:
    """JSON text as its value; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict | list) else value


def valid_unicode(text: str) -> str:
    r"""JSON escapes can smuggle in half a surrogate pair (`\ud83d`), which no tokenizer takes.

    Raises:
        BadRecordError: it has one.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecordError(Finding.NOT_UTF8) from None
    return text
