"""`slipstream recipe [show] RECIPE`: the run that a recipe and its overrides define, and where each value came from."""

import argparse
import json
from collections.abc import Sequence

_ACTIONS = ("ls", "list", "show")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("recipe", help="run definitions: show one, list those that ship")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("ls", aliases=["list"], help="names of the recipes that ship with Slipstream")
    show = actions.add_parser(
        "show",
        help="print the resolved run",
        description="Prints the run as TOML, every setting with its origin: default, FILE:LINE or override.",
    )
    show.add_argument("recipe", metavar="RECIPE", help="a .toml file, or the name of a recipe that ships")
    show.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override; a later one wins")
    show.add_argument("-o", "--output", choices=("text", "json"), default="text")


def complete(arguments: Sequence[str]) -> list[str]:
    """`recipe my.toml` means `recipe show my.toml`."""
    after = arguments.index("recipe") + 1
    words = [*arguments]
    if len(words) > after and not words[after].startswith("-") and words[after] not in _ACTIONS:
        words.insert(after, "show")
    return words


def run(args: argparse.Namespace) -> int:
    """Print the recipe, or the list.

    Raises:
        SlipstreamError: SPEC_INVALID, with every error of the recipe.
    """
    # pydantic costs a tenth of a second: not for `--help`.
    import recipes
    from slipstream.run_spec.load import describe, load_recipe

    if args.action in ("ls", "list"):
        print("\n".join(recipes.recipe_names()))
        return 0
    loaded = load_recipe(recipes.find_recipe(args.recipe), args.set)
    if args.output == "json":
        print(json.dumps({"spec": loaded.spec.model_dump(mode="json"), "origins": dict(loaded.origins)}, indent=2))
    else:
        print(describe(loaded), end="")
    return 0
