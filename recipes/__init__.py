"""Run definitions that ship with Slipstream, one TOML per target and hardware, with the small data they need."""

import difflib
import os
from contextlib import suppress
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_DIRECTORY = Path(__file__).parent
_NO_RECIPE = "pyproject.toml"
_MOST_LISTED = 5
_NEAR_ENOUGH_HERE = 0.5  # mx is half of my


def recipe_names() -> tuple[str, ...]:
    """Names of the shipped recipes, sorted, without `.toml`."""
    return tuple(sorted(path.stem for path in _DIRECTORY.glob("*.toml")))


def recipe_path(name: str) -> Path:
    """The file of a shipped recipe; `name` with or without `.toml`.

    Raises:
        SlipstreamError: SPEC_INVALID, no such recipe; the message names those that exist.
    """
    stem = name.removesuffix(".toml")
    if stem in recipe_names():
        return _DIRECTORY / f"{stem}.toml"
    here: list[str] = []
    with suppress(OSError):  # the working directory may not be read, or is gone
        here = sorted(file.stem for file in Path().glob("*.toml") if file.name != _NO_RECIPE)
    near = [f"{one}.toml" for one in difflib.get_close_matches(stem, here, n=1, cutoff=_NEAR_ENOUGH_HERE)]
    near += difflib.get_close_matches(stem, recipe_names(), n=1)
    listed = f"Shipped recipes: {', '.join(recipe_names())}." + (f" Here: {_some_of(here)}." if here else "")
    raise SlipstreamError(
        f"no shipped recipe is called {name!r}, and no file here",
        reason=Reason.SPEC_INVALID,
        remedy=f"Did you mean {' or '.join(map(repr, near))}?" if near else listed,
    )


def _some_of(stems: list[str]) -> str:
    return ", ".join(f"{one}.toml" for one in stems[:_MOST_LISTED]) + (", …" if len(stems) > _MOST_LISTED else "")


def find_recipe(argument: str) -> Path:
    """The recipe that a command line means: a path has a slash in it or exists; anything else is a shipped name.

    Raises:
        SlipstreamError: SPEC_INVALID, no shipped recipe is called so.
    """
    if "://" in argument:
        raise SlipstreamError(
            f"{argument} is the address of something elsewhere, not a recipe on this machine.",
            reason=Reason.SPEC_INVALID,
            remedy="Download the recipe and give its path; a model is named with --model or target.model.",
        )
    is_name = not argument or ("/" not in argument and not Path(argument).exists())
    return recipe_path(argument) if is_name else Path(argument)


def data_file(name: str) -> Path | None:
    """The shipped file that a recipe names relative to itself, or by its whole path; None when there is none."""
    path = Path(os.path.normpath(_DIRECTORY / name))
    return path if path in set((_DIRECTORY / "data").iterdir()) else None
