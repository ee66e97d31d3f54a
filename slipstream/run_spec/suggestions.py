"""Known keys of a run definition and the one that a misspelt key most likely meant."""

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType

from pydantic import BaseModel

from slipstream.run_spec.spec import RunSpec


@cache
def known_keys() -> Mapping[str, tuple[str, ...]]:
    """Keys of every table, by the table's dotted path; "" is the top of the recipe."""
    tables: dict[str, tuple[str, ...]] = {}

    def visit(model: type[BaseModel], path: str) -> None:
        tables[path] = tuple(model.model_fields)
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                visit(field.annotation, f"{path}.{name}".lstrip("."))

    visit(RunSpec, "")
    return MappingProxyType(tables)


def nearest(word: str, candidates: Sequence[str]) -> str | None:
    """The candidate spelt most like `word`, if any is close."""
    matches = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return matches[0] if matches else None


def suggest_key(unknown: str) -> str:
    """What to use in place of the dotted key `unknown`, as a phrase.

    A near spelling in the same table comes first, then the same name in another table, then all keys of the table.
    """
    table, _, leaf = unknown.rpartition(".")
    tables = known_keys()
    keys = tables.get(table, ())
    close = nearest(leaf, keys)
    if close is not None:
        return f"did you mean {_join(table, close)}?"
    elsewhere = [_join(other, leaf) for other, names in tables.items() if leaf in names]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    where = f"[{table}]" if table else "the top of a recipe"
    return f"known keys of {where}: {', '.join(keys)}"


def _join(table: str, leaf: str) -> str:
    return f"{table}.{leaf}" if table else leaf
