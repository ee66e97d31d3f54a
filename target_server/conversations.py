"""Step ① of a pack's path: lines of JSONL files become conversations; bad lines are counted, never fatal."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from slipstream.wire.data_report import Finding, ReportBuilder

LineFormat = Literal["auto", "openai", "sharegpt"]

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_OPENAI_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
_SHAREGPT_ROLES = {
    **_OPENAI_ROLES,
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
}


@dataclass(frozen=True)
class Turn:
    """One message: `role` is system, user or assistant; `content` holds more than white space."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """Turns up to the last answer; what a user said after it teaches nothing and is left out."""

    id: str
    """The line's `id`, else file name and line number."""
    where: str
    """`file.jsonl:17`, for reports."""
    turns: tuple[Turn, ...]
    finished: bool
    """False where the last answer was cut off: no end of turn belongs after it."""


class _BadLineError(Exception):
    """A line that gives no conversation; never leaves this module."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.value)
        self.finding = finding


def read_conversations(path: Path, line_format: LineFormat, report: ReportBuilder) -> Iterator[Conversation]:
    """Yield the conversations of a JSONL file, plain or gzip (told by its first bytes), in file order.

    Lines: OpenAI `{"messages": [{"role", "content"}]}` (content: text, or a list of text parts) or ShareGPT
    `{"conversations": [{"from", "value"}]}`, with optional `id` and `finished`; `auto` decides line by line.
    Counts every line that is not blank in `report.read`, and drops bad ones with a finding. Holds one line at a time.
    Raises OSError if the file cannot be opened or read.
    """
    for number, line in _lines(path, report):
        where = f"{_printable_name(path)}:{number}"
        report.read += 1
        try:
            yield _parse_line(line, line_format, where)
        except _BadLineError as bad:
            report.drop(bad.finding, where)


def _lines(path: Path, report: ReportBuilder) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, numbered from 1. Damaged gzip data ends the file and is counted as one line."""
    number = 0
    with path.open("rb") as raw:
        is_gzip = raw.peek(2)[:2] == _GZIP_MAGIC
        stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if is_gzip else raw
        try:
            for number, line in enumerate(stream, start=1):
                text = line.removeprefix(_UTF8_BOM) if number == 1 else line
                if not text.isspace() and text:
                    yield number, text
        except (EOFError, gzip.BadGzipFile, zlib.error):
            report.read += 1
            report.drop(Finding.DAMAGED_GZIP, f"{_printable_name(path)}:{number + 1}")


def _printable_name(path: Path) -> str:
    """The file's name; bytes that are not UTF-8 are escaped, since the name becomes part of ids and JSON."""
    return path.name.encode(errors="backslashreplace").decode()


def _parse_line(line: bytes, line_format: LineFormat, where: str) -> Conversation:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise _BadLineError(Finding.NOT_UTF8) from None
    except (ValueError, RecursionError):  # RecursionError: brackets nested thousands deep
        raise _BadLineError(Finding.BROKEN_JSON) from None
    if not isinstance(record, dict):
        raise _BadLineError(Finding.NOT_AN_OBJECT)
    turns = _parse_turns(record, line_format)
    last_answer = max((index for index, turn in enumerate(turns) if turn.role == "assistant"), default=None)
    if last_answer is None:
        raise _BadLineError(Finding.NO_ASSISTANT_TURN)
    return Conversation(
        id=_conversation_id(record, where),
        where=where,
        turns=tuple(turns[: last_answer + 1]),
        finished=record.get("finished") is not False,
    )


def _conversation_id(record: Mapping[str, Any], where: str) -> str:
    given = record.get("id")
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    return _valid_unicode(given) if isinstance(given, str) and given else where


def _parse_turns(record: Mapping[str, Any], line_format: LineFormat) -> list[Turn]:
    if line_format == "auto":
        line_format = "openai" if "messages" in record else "sharegpt"
    if line_format == "openai":
        turns_key, role_key, content_key, roles = "messages", "role", "content", _OPENAI_ROLES
    else:
        turns_key, role_key, content_key, roles = "conversations", "from", "value", _SHAREGPT_ROLES
    entries = record.get(turns_key)
    if not isinstance(entries, list) or not entries:
        raise _BadLineError(Finding.NO_TURNS)
    turns = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise _BadLineError(Finding.NO_TURNS)
        role = entry.get(role_key)
        if not isinstance(role, str) or role not in roles:
            raise _BadLineError(Finding.UNKNOWN_ROLE)
        if entry.get("tool_calls") or entry.get("function_call"):
            raise _BadLineError(Finding.UNSUPPORTED_CONTENT)
        turns.append(Turn(roles[role], _parse_content(entry.get(content_key))))
    return turns


def _parse_content(content: object) -> str:
    if content is None:
        raise _BadLineError(Finding.EMPTY_TURN)
    if isinstance(content, list):
        content = "".join(_parse_part(part) for part in content)
    if not isinstance(content, str):
        raise _BadLineError(Finding.UNSUPPORTED_CONTENT)
    if not content.strip():
        raise _BadLineError(Finding.EMPTY_TURN)
    return _valid_unicode(content)


def _parse_part(part: object) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return cast(str, part["text"])
    raise _BadLineError(Finding.UNSUPPORTED_CONTENT)


def _valid_unicode(text: str) -> str:
    r"""JSON escapes can smuggle in half a surrogate pair (`\ud83d`), which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadLineError(Finding.NOT_UTF8) from None
    return text
