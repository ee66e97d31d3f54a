"""Validation errors in the words of a recipe: the key, what was found, what was expected."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from slipstream.run_spec.spec import RunSpec
from slipstream.run_spec.suggestions import nearest, suggest_key

_TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "an array",
    "model_type": "a table",
    "finite_number": "a finite number",
    "string_too_short": "a string that is not empty",
}
_LIMITS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
    "multiple_of": ("a multiple of", "multiple_of"),
}
_FOUND_CHARACTERS = 60


def describe_problem(error: ErrorDetails, sources: Mapping[str, str]) -> str:
    """One line: where it was set, the dotted key, what is wrong with it.

    Args:
        error: one entry of pydantic's `ValidationError.errors()`.
        sources: where keys and tables were set, by dotted key.
    """
    location = error["loc"]
    key = ".".join(str(part) for part in location)
    source = _nearest_source(location, sources)
    subject = f"{key}: " if key else ""
    hint = _override_hint(key, error) if source == "override" else ""
    where = f"{source}: " if source else ""
    return f"{where}{subject}{_complaint(key, error)}{hint}"


def _complaint(key: str, error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key; {suggest_key(key)}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        last = error["loc"][-1]
        return f"missing; expected {_field_help(error['loc'])}" if isinstance(last, str) else "missing entry"
    found = _describe_value(error["input"])
    return f"found {found}, expected {_expected(kind, context, error)}"


def _expected(kind: str, context: Mapping[str, Any], error: ErrorDetails) -> str:
    if kind in _TYPES:
        return _TYPES[kind]
    if kind in _LIMITS:
        words, bound = _LIMITS[kind]
        return f"{words} {context[bound]:g}"
    if kind == "literal_error":
        choices = str(context["expected"])
        close = nearest(str(error["input"]), re.findall("'([^']*)'", choices))
        return choices + (f"; did you mean {close!r}?" if close else "")
    if kind in ("too_short", "too_long"):
        bound = context.get("min_length", context.get("max_length"))
        return f"{'at least' if kind == 'too_short' else 'at most'} {bound} entries"
    if kind == "string_pattern_mismatch":
        return _field_help(error["loc"])
    return error["msg"]


def _field_help(location: tuple[int | str, ...]) -> str:
    """What belongs at a place of the recipe: the required keys of a table, else the documentation of the setting."""
    model: Any = RunSpec
    field: FieldInfo | None = None
    for part in location:
        if isinstance(part, int):
            break
        field = model.model_fields[part]
        model = field.annotation
    assert field is not None, "pydantic reports missing and mismatched values at a field"
    if isinstance(model, type) and issubclass(model, BaseModel):
        required = [name for name, inner in model.model_fields.items() if inner.is_required()]
        return f"a table with {', '.join(required)}" if required else f"a table; {_first_line(model.__doc__)}"
    return _first_line(field.description)


def _first_line(documentation: str | None) -> str:
    line = (documentation or "a value").strip().split("\n")[0].rstrip(".")
    return line if line[1:2].isupper() else line[0].lower() + line[1:]


def _describe_value(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "float", str: "string", list: "array", dict: "table"}
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > _FOUND_CHARACTERS:
        text = text[:_FOUND_CHARACTERS] + "…"
    return f"{text} ({kinds.get(type(value), type(value).__name__)})"


def _override_hint(key: str, error: ErrorDetails) -> str:
    """How to quote an override whose value was read as another TOML type than the one that was meant."""
    value = json.dumps(error["input"], ensure_ascii=False)
    if error["type"] == "string_type":
        return f"; write {key}='\"{value}\"'"
    if error["type"] == "tuple_type":
        return f"; write {key}='[{value}]'"
    return ""


def _nearest_source(location: tuple[int | str, ...], sources: Mapping[str, str]) -> str:
    parts = [str(part) for part in location]
    for length in range(len(parts), 0, -1):
        source = sources.get(".".join(parts[:length]))
        if source is not None:
            return source
    return ""
