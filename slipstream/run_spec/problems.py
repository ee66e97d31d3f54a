"""Validation errors in the words of a recipe: the key, what was found, what was expected."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
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
_UNIONS = {
    "target.compile": "'auto', true or false",
    "drafter.options.": "true, false, a number or a string",
    "train.activation_checkpointing": "true, false, or a number of layers, at least 1",
    "train.cuda_graphs": "'auto', true or false",
}
"""What belongs there: pydantic reports every type that would have been right, each under a name of its own."""
_FOUND_CHARACTERS = 60


def problems_of(
    invalid: ValidationError, sources: Mapping[str, str], below: tuple[str, ...] = ()
) -> list[tuple[str, str]]:
    """Dotted key and line of every problem, each once.

    Args:
        invalid: what pydantic found.
        sources: as of `describe_problem`.
        below: of which table of a recipe the model is.
    """
    errors: list[ErrorDetails] = [
        {**error, "loc": (*below, *error["loc"])} for error in invalid.errors(include_url=False)
    ]
    # An entry of a wrong type is not counted either; that the array is too short then says nothing.
    arrays = {error["loc"][:-1] for error in errors}
    told = [error for error in errors if not (error["type"] == "too_short" and error["loc"] in arrays)]
    return list(dict.fromkeys((_key(error["loc"]), describe_problem(error, sources)) for error in told))


def describe_problem(error: ErrorDetails, sources: Mapping[str, str]) -> str:
    """One line: where it was set, the dotted key, what is wrong with it.

    Args:
        error: one entry of pydantic's `ValidationError.errors()`.
        sources: where keys and tables were set, by dotted key.
    """
    location = error["loc"]
    key = _key(location)
    source = _nearest_source(location, sources)
    subject = f"{key}: " if key else ""
    hint = _override_hint(key, error) if source == "override" else ""
    where = f"{source}: " if source else ""
    return f"{where}{subject}{_complaint(key, error)}{hint}"


def _key(location: tuple[int | str, ...]) -> str:
    """Dotted, without what pydantic calls the types of a union."""
    key = ".".join(str(part) for part in location)
    union = _union_of(key)
    return key if union is None else ".".join(key.split(".")[: len(union.split("."))])


def _union_of(key: str) -> str | None:
    return next((union for union in _UNIONS if f"{key}.".startswith(f"{union.rstrip('.')}.")), None)


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
    union = _union_of(key)
    return f"found {found}, expected {_expected(kind, context, error) if union is None else _UNIONS[union]}"


def _expected(kind: str, context: Mapping[str, Any], error: ErrorDetails) -> str:
    if kind in _TYPES:
        return _TYPES[kind]
    if kind in _LIMITS:
        words, bound = _LIMITS[kind]
        return f"{words} {context[bound]:.15g}"
    if kind == "literal_error":
        choices = str(context["expected"])
        close = nearest(str(error["input"]), re.findall("'([^']*)'", choices))
        return choices + (f"; did you mean {close!r}?" if close else "")
    if kind in ("too_short", "too_long"):
        bound = context.get("min_length", context.get("max_length"))
        entries = "entry" if bound == 1 else "entries"
        return f"{'at least' if kind == 'too_short' else 'at most'} {bound} {entries}"
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
    if isinstance(error["loc"][-1], int) or _union_of(key) is not None:
        return ""
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
    # A table that nobody wrote: an override of one of its keys made it.
    below = ".".join(parts) + "."
    return next((source for key, source in sources.items() if key.startswith(below)), "")
