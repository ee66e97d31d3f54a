"""On which line of a TOML file each key is set: the standard library's parser does not say."""

import tomllib
from typing import Any


def key_lines(text: str) -> dict[str, int]:
    """Line (from 1) of every key and table header of a valid TOML document, by dotted key.

    A statement is found by reading lines until they parse on their own, so quoted keys, multi-line arrays and
    multi-line strings need no rules here.
    """
    lines: dict[str, int] = {}
    table: tuple[str, ...] = ()
    statement, first_line = "", 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not statement:
            stripped = line.strip()
            if not stripped or stripped.startswith("#"):
                continue
            if stripped.startswith("["):
                table = _innermost(tomllib.loads(line))
                lines.setdefault(".".join(table), number)
                continue
            first_line = number
        statement += line + "\n"
        try:
            parsed = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        for path in _paths(parsed):
            lines[".".join((*table, *path))] = first_line
        statement = ""
    return lines


def _innermost(header: dict[str, Any]) -> tuple[str, ...]:
    path: list[str] = []
    node: Any = header
    while isinstance(node, dict) and node:
        key = next(iter(node))
        path.append(key)
        node = node[key]
    return tuple(path)


def _paths(node: dict[str, Any]) -> list[tuple[str, ...]]:
    """Paths of all keys below `node`, inner tables included."""
    found: list[tuple[str, ...]] = []
    for key, value in node.items():
        found.append((key,))
        if isinstance(value, dict):
            found += [(key, *rest) for rest in _paths(value)]
    return found
