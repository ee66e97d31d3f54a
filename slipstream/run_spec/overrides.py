"""Dotted overrides from a command line: `train.max_steps=100`, `data.files=["a.jsonl"]`, `train.epochs=`."""

import datetime
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

# A value that opens one of these was meant as TOML: if it does not parse, that is an error and not a bare word.
_TOML_OPENERS = ('"', "'", "[", "{")


@dataclass(frozen=True)
class Override:
    """One override: the key as a path, and the value; `remove` takes the key out, back to its default."""

    path: tuple[str, ...]
    value: Any
    remove: bool = False

    @property
    def key(self) -> str:
        """The dotted key."""
        return ".".join(self.path)


def parse_override(text: str) -> Override:
    """Read `dotted.key=value`; the value is TOML, a bare word is a string, and nothing at all removes the key.

    Raises:
        SlipstreamError: SPEC_INVALID, when there is no key or the value is broken TOML.
    """
    key, equals, raw = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise SlipstreamError(
            f"override {text!r} is not of the form key=value.",
            reason=Reason.SPEC_INVALID,
            remedy="Write for example train.max_steps=100 or data.files='[\"a.jsonl\"]'.",
        )
    raw = raw.strip()
    if not raw:
        return Override(path, None, remove=True)
    return Override(path, _parse_value(".".join(path), raw))


def _parse_value(key: str, raw: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError as error:
        if not raw.startswith(_TOML_OPENERS):
            return raw
        reason = str(error).split(" (at ")[0]
        raise SlipstreamError(
            f"override of {key}: {raw} is not a TOML value ({reason}).",
            reason=Reason.SPEC_INVALID,
            remedy="Quote it for the shell, for example --set 'data.files=[\"a.jsonl\"]'.",
        ) from None
    value = parsed["value"]
    # A second line would smuggle in another key, and no setting is a date: both are plain words.
    if len(parsed) > 1 or isinstance(value, datetime.date | datetime.time):
        return raw
    return value


def apply_overrides(recipe: dict[str, Any], overrides: Sequence[Override]) -> None:
    """Write the overrides into the parsed recipe, in order; a later one wins.

    Raises:
        SlipstreamError: SPEC_INVALID, when a path leads through a value that is not a table.
    """
    for override in overrides:
        table = recipe
        for depth, part in enumerate(override.path[:-1]):
            child = table.setdefault(part, {})
            if not isinstance(child, dict):
                prefix = ".".join(override.path[: depth + 1])
                raise SlipstreamError(
                    f"override of {override.key}: {prefix} is {child!r}, not a table.",
                    reason=Reason.SPEC_INVALID,
                    remedy=f"Override {prefix} itself, or correct it in the recipe.",
                )
            table = child
        if override.remove:
            table.pop(override.path[-1], None)
        else:
            table[override.path[-1]] = override.value
