"""From the name of a drafter architecture to its code: Slipstream's own, or what an installed package brings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slipstream.errors import SlipstreamError
from slipstream.run_spec.architectures import DFLASH, GROUP, entry_points_of, installed_architectures
from slipstream.run_spec.reasons import Reason

if TYPE_CHECKING:
    from drafter_trainer.drafter_config import DrafterConfig


def configuration_of(name: object, reason: Reason) -> "type[DrafterConfig]":
    """The configuration's class, from which all else of the architecture is made.

    Args:
        name: as a recipe or a checkpoint has it.
        reason: of the refusal, where there is no such architecture.

    Raises:
        SlipstreamError: `reason`; ENVIRONMENT_UNSUPPORTED, its package cannot be loaded, or is none.
    """
    from drafter_trainer.drafter_config import DFlashConfig, DrafterConfig

    if name == DFLASH:
        return DFlashConfig
    found = entry_points_of(name) if isinstance(name, str) else ()
    if not found:
        raise SlipstreamError(
            f"the drafter's architecture is {name!r}, installed here: {', '.join(installed_architectures())}",
            reason=reason,
            remedy=f"Install the package that brings it (entry points {GROUP}), or correct the name.",
        )
    if len(found) > 1:
        raise _unusable(name, f"several packages bring it: {', '.join(sorted(one.value for one in found))}")
    with failures_of_package(name, f"{found[0].value} cannot be loaded"):
        loaded = found[0].load()
    if not (isinstance(loaded, type) and issubclass(loaded, DrafterConfig)):
        raise _unusable(name, f"{found[0].value} is no subclass of DrafterConfig")
    if getattr(loaded, "architecture", None) != name:
        raise _unusable(name, f"{found[0].value} calls itself {getattr(loaded, 'architecture', None)!r}")
    return loaded


@contextmanager
def failures_of_package(name: object, what: str) -> Iterator[None]:
    """Whatever the code of the package raises is said in words, as its failure; Slipstream's own stays a crash.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED; one that the package raises goes through.
    """
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as error:
        if name == DFLASH:
            raise
        raise _unusable(name, f"{what}: {type(error).__name__}: {error}") from error


def _unusable(name: object, why: str) -> SlipstreamError:
    return SlipstreamError(
        f"the drafter architecture {name!r} cannot be used: {why}",
        reason=Reason.ENVIRONMENT_UNSUPPORTED,
        remedy="Mend or remove the package; docs/drafters.md says what it must bring.",
    )
