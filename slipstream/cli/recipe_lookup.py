"""The recipe that an argument means: a file, or the name of one that ships."""

from pathlib import Path

import recipes


def find_recipe(argument: str) -> Path:
    """A path has a slash in it or exists; anything else is a name.

    Raises:
        SlipstreamError: SPEC_INVALID, no shipped recipe is called so.
    """
    is_name = "/" not in argument and not Path(argument).exists()
    return recipes.recipe_path(argument) if is_name else Path(argument)
