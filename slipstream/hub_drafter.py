"""Drafters that are published at a hub: which commit a name means, and their files in the hub cache. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from slipstream.errors import SlipstreamError
from slipstream.hub_reach import connection_failures, why_unreachable
from slipstream.run_spec.reasons import Reason

# Configuration, tensors, and what `slipstream.json` has checksums of; the code is never run, and nothing pickled read.
_FILES = ["*.json", "*.safetensors", "*.py", "*.md"]
_CONFIG = "config.json"

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class HubDrafter:
    """OWNER/NAME[@REVISION]."""

    repository: str
    revision: str | None = None
    """Branch, tag or commit; None: the main branch."""

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


def pinned(drafter: HubDrafter) -> HubDrafter:
    """The same with the commit that its revision is now, as the hub says, or its cache where the hub cannot be asked.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, neither has such a drafter.
    """
    if (why := _why_not_asked()) is not None:
        return replace(drafter, revision=_in_cache(drafter, why).name)
    # A third of a second, and only for hub names.
    from huggingface_hub import hf_hub_download

    found = _asked(drafter, lambda: hf_hub_download(drafter.repository, _CONFIG, revision=drafter.revision))
    # The cache keeps what it has of a commit below snapshots/COMMIT.
    return replace(drafter, revision=Path(found).parent.name)


def fetch_drafter(drafter: HubDrafter) -> Path:
    """The directory of its files, in the hub cache; downloaded where the hub can be asked.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, neither hub nor cache has such a drafter.
    """
    if (why := _why_not_asked()) is not None:
        return _in_cache(drafter, why)
    from huggingface_hub import snapshot_download

    return Path(
        _asked(drafter, lambda: snapshot_download(drafter.repository, revision=drafter.revision, allow_patterns=_FILES))
    )


def _why_not_asked() -> str | None:
    """Why the hub cannot be asked, in words; its client would try for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    why = why_unreachable(constants.ENDPOINT)
    return None if why is None else f"{constants.ENDPOINT} cannot be reached: {why}"


def _in_cache(drafter: HubDrafter, why_not_asked: str) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    try:
        found = Path(snapshot_download(drafter.repository, revision=drafter.revision, local_files_only=True))
        if (found / _CONFIG).is_file() and any(found.glob("*.safetensors")):
            return found
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        pass
    raise _invalid(
        f"the hub's {drafter} is neither in its cache ({constants.HF_HUB_CACHE}) nor to be had ({why_not_asked})",
        f"Check the network, or fetch it elsewhere: `{_download(drafter)}`, then name DIR.",
    )


def _asked(drafter: HubDrafter, question: Callable[[], Answer]) -> Answer:
    from huggingface_hub import errors

    try:
        return question()
    except errors.HFValidationError as error:
        raise _invalid(f"{str(drafter)!r} is no name of a hub", "Write OWNER/NAME or OWNER/NAME@REVISION.") from error
    except errors.GatedRepoError as error:
        raise _invalid(
            f"the hub does not give out {drafter}: its licence has to be accepted first",
            "Accept it on its page, then log in with `hf auth login` or set HF_TOKEN.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise _invalid(
            f"the hub's {drafter.repository} has no revision {drafter.revision!r}",
            "Name a branch, tag or commit of it, or leave @REVISION out.",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise _invalid(
            f"the hub has no {drafter.repository!r}, or it is private",
            "Check the spelling of OWNER/NAME, or of the path; for a private one set HF_TOKEN.",
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise _invalid(f"the hub's {drafter} holds no drafter: it has no {_CONFIG}", "Check the spelling.") from error
    except connection_failures() as error:
        # Covers HTTP errors, too, and a cache that cannot be written.
        raise _invalid(
            f"the hub's {drafter} could not be asked for ({type(error).__name__})",
            f"Try again, or fetch it elsewhere: `{_download(drafter)}`, then name DIR.",
        ) from error


def _download(drafter: HubDrafter) -> str:
    revision = f" --revision {drafter.revision}" if drafter.revision else ""
    return f"hf download {drafter.repository}{revision} --local-dir DIR"


def _invalid(message: str, remedy: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.CHECKPOINT_INVALID, remedy=remedy)
