"""What a drafter is called where a run begins with it or it is measured: a path, RUN[@STEP], OWNER/NAME[@REVISION].

A path that exists wins. What has no slash is a run, OWNER/NAME a drafter of a hub, unless a directory OWNER is there;
all else is a path. No torch here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream.checkpoint_name import find_checkpoint, split_name
from slipstream.errors import SlipstreamError
from slipstream.hub_drafter import HubDrafter, fetch_drafter
from slipstream.model_names import is_hub_model
from slipstream.run_spec.reasons import Reason


@dataclass(frozen=True)
class RunName:
    """A run, and which of its checkpoints."""

    run: str
    choice: str
    """As `SavedSteps.choose` takes it."""


DrafterName = Path | RunName | HubDrafter


def drafter_name(text: str, directory: Path | None) -> DrafterName:
    """What is meant; a path is absolute, or relative to what `directory` is relative to.

    Args:
        text: as a person wrote it.
        directory: where a relative path starts; None: nothing can be looked for.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, an address of the web.
    """
    if "://" in text:
        raise SlipstreamError(
            f"{text} is an address elsewhere, no drafter on this machine",
            reason=Reason.CHECKPOINT_INVALID,
            remedy="A drafter of a hub is named OWNER/NAME or OWNER/NAME@REVISION; another one is downloaded first.",
        )
    path = Path(os.path.normpath((directory or Path()) / os.path.expanduser(text)))  # noqa: PTH111
    if directory is not None and _exists(path):
        return path
    if "/" not in text and not text.startswith("~"):
        return RunName(*split_name(text))
    repository, at, revision = text.partition("@")
    if is_hub_model(repository) and bool(at) == bool(revision):
        owner = text.partition("/")[0]
        if directory is None or not _exists(directory / owner):
            return HubDrafter(repository, revision or None)
    return path


def find_drafter(text: str, home: Path | None = None) -> Path:
    """The directory of a checkpoint, a run or a drafter in one of the formats; one of a hub is fetched.

    Args:
        text: a relative path starts where this process works.
        home: of the local stack, as --home of a command line.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, with all that was looked for.
    """
    named = drafter_name(text, Path())
    if not isinstance(named, HubDrafter):
        return find_checkpoint(text, home)
    with also_no_path(text):
        return fetch_drafter(named)


@contextmanager
def also_no_path(text: str) -> Iterator[None]:
    """A mistyped path looks like a name of a hub: who hears that the hub has none of this name hears that, too."""
    try:
        yield
    except SlipstreamError as error:
        message = f"there is no drafter {text!r}: it is no path here, and {error.message}"
        raise SlipstreamError(message, reason=error.reason, remedy=error.remedy) from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a zero byte
        return False
