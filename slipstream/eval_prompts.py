"""Prompts for evaluation: JSONL(.gz) with `messages` or `prompt`, maybe with `id` and `source`; where answers end."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

if TYPE_CHECKING:
    from slipstream.target_loading import LoadedTarget


@dataclass(frozen=True)
class Prompt:
    """One prompt: chat messages that end with the user's."""

    id: str
    source: str
    messages: tuple[dict[str, str], ...]


def load_prompts(path: Path, per_source: int | None) -> list[Prompt]:
    """The first `per_source` prompts of every source (all when None), in file order.

    Raises:
        SlipstreamError: DATA_INVALID, the file is missing, a line is no prompt, or there is none.
    """
    counts: dict[str, int] = {}
    prompts = []
    for prompt in _read(path):
        counts[prompt.source] = counts.get(prompt.source, 0) + 1
        if per_source is None or counts[prompt.source] <= per_source:
            prompts.append(prompt)
    if not prompts:
        raise _invalid(
            f"{path} holds no prompts: its lines are empty, or there are none; expected at least one",
            "Give a JSONL file with one prompt a line.",
        )
    return prompts


def end_ids(target: "LoadedTarget") -> frozenset[int]:
    """Tokens that end an answer: the model's own and the tokenizer's."""
    configured = target.model.generation_config.eos_token_id if target.model.generation_config else None
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in (*listed, target.tokenizer.eos_token_id) if i is not None)


def _read(path: Path) -> Iterator[Prompt]:
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse(line, f"{path.name}:{number}", path.stem)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _invalid(f"{path} cannot be read: {why}", "Give a readable JSONL or JSONL.gz file.") from error


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _parse(line: str, where: str, default_source: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise _invalid(f"{where} is not JSON: {error}", "Mend or remove the line.") from error
    if not _is_unicode(record):
        raise _invalid(
            f"{where} has half a surrogate pair (\\ud800 to \\udfff), which is no character of a text",
            "Write the whole character, or remove the line.",
        )
    if not isinstance(record, dict):
        raise _invalid(f"{where} is a JSON {type(record).__name__}, expected an object", "Mend or remove the line.")
    messages = record.get("messages")
    if messages is None and isinstance(record.get("prompt"), str):
        messages = [{"role": "user", "content": record["prompt"]}]
    if not isinstance(messages, list) or not _are_messages(messages):
        raise _invalid(
            f"{where} has {_found(record)}, expected `messages` (role and content, both text, the last from the user) "
            "or a `prompt`",
            "Mend or remove the line.",
        )
    kept = tuple({"role": m["role"], "content": m["content"]} for m in messages)
    return Prompt(str(record.get("id", where)), str(record.get("source", default_source)), kept)


def _found(record: dict[str, Any]) -> str:
    """What a record has in place of a prompt, in words."""
    messages = record.get("messages")
    if messages is None:
        shown = ", ".join(repr(key) for key in list(record)[:6]) + (", …" if len(record) > 6 else "")
        return f"{'no text in ' if 'prompt' in record else ''}the keys {shown}" if record else "no keys"
    if isinstance(messages, list) and messages and _are_texts(messages):
        return f"`messages` whose last is from {messages[-1]['role']!r}"
    return "`messages` that are no such list"


def _is_unicode(record: object) -> bool:
    """JSON can name half a surrogate pair; no tokenizer takes one."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_messages(messages: list[Any]) -> bool:
    return bool(messages) and _are_texts(messages) and messages[-1]["role"] == "user"


def _are_texts(messages: list[Any]) -> bool:
    return all(isinstance(m, dict) and {type(m.get("role")), type(m.get("content"))} == {str} for m in messages)


def _invalid(message: str, remedy: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.DATA_INVALID, remedy=remedy)
