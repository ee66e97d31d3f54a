"""Names of the drafter architectures that are installed here; their code, which needs torch, is not loaded."""

from importlib.metadata import EntryPoint, entry_points

from pydantic import ValidationError

DFLASH = "dflash"
"""The one that comes with Slipstream."""
GROUP = "slipstream.drafters"
"""Entry points of packages that bring others: see docs/drafters.md."""


def installed_architectures() -> tuple[str, ...]:
    """Names that `drafter.architecture` may have on this machine, Slipstream's own first."""
    return (DFLASH, *sorted({one.name for one in entry_points(group=GROUP)} - {DFLASH}))


def entry_points_of(name: str) -> tuple[EntryPoint, ...]:
    """Where packages say that the architecture lies; more than one place is an error of who installed them."""
    return tuple({one.value: one for one in entry_points(group=GROUP, name=name)}.values())


def remedy_where_missing(error: ValidationError) -> str | None:
    """What to do about a saved run whose drafter's architecture is not installed; None: that is not the error."""
    missing = any(problem["loc"] == ("drafter", "architecture") for problem in error.errors())
    return f"Install the package that brings this architecture (entry points {GROUP})." if missing else None


def require_installed(name: str) -> str:
    """The name, if a recipe may use it here.

    Raises:
        ValueError: it is none, with the nearest that is.
    """
    # Asking the packages takes longer than all the rest of a recipe.
    if name == DFLASH or name in installed_architectures():
        return name
    from slipstream.run_spec.suggestions import nearest  # it knows all settings, this one included

    close = nearest(name, installed_architectures())
    raise ValueError(
        f"{name!r} is no drafter architecture that is installed here; expected one of "
        f"{', '.join(installed_architectures())}" + (f"; did you mean {close!r}?" if close else "")
    )
