"""What a recipe's `data.files` name: files, globs, directories and data sets of a hub; allowed paths only.

A directory is read like the hub's: what `save_to_disk` wrote, or every data file below it; if names tell a `train`
split from others, that split. `hf://datasets/OWNER/NAME[@REVISION][/FILE-OR-GLOB]` is downloaded into the hub cache of
this machine, with the token that `hf auth login` or HF_TOKEN gives.
"""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from slipstream.data_directory import DATA_SUFFIXES, data_files, training_files
from slipstream.errors import SlipstreamError
from slipstream.hub_reach import connection_failures
from slipstream.run_spec.data_entries import GLOB, is_hub_name, split_glob
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from target_server.record_files import SourceFile

HUB_PREFIX = "hf://datasets/"

_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?")

_DOWNLOAD = "Download it and name the file; a data set of a hub is hf://datasets/OWNER/NAME."
_CORRECT_FILES = "Correct the path (in a recipe: data.files); it must be valid on the machine that reads it."

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileStamp:
    """What changes when a file does."""

    size: int
    mtime_ns: int
    inode: int


def find_files(entries: Sequence[str], data_roots: Sequence[Path] | None) -> tuple[SourceFile, ...]:
    """The files that `data.files` name, in that order; below a directory by name.

    Args:
        entries: paths, globs, directories, hub names.
        data_roots: directories that files must lie in (symbolic links followed); None allows every path.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED outside of `data_roots`, whether it exists or not; DATA_INVALID for what is
            no file, matches nothing, or cannot be had from the hub.
    """
    return tuple(file for entry in entries for file in _files_of(entry, data_roots))


def file_stamp(path: Path) -> FileStamp:
    """Size, time of the last change and inode.

    Raises:
        SlipstreamError: DATA_INVALID.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, str(error.strerror or error)) from error
    return FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)


def unreadable(
    path: Path, why: str, remedy: str = "Check that the target server may read the file."
) -> SlipstreamError:
    """A DATA_INVALID error about a file."""
    return SlipstreamError(f"{path} cannot be read: {why}.", reason=Reason.DATA_INVALID, remedy=remedy)


def _files_of(entry: str, data_roots: Sequence[Path] | None) -> list[SourceFile]:
    if is_hub_name(entry):
        directory, pattern = _hub_directory(entry, data_roots)
        return _matching(directory, pattern, entry) if pattern else _below(directory, entry)
    path = _allowed(entry, data_roots, entry)
    try:
        if path.is_dir():
            files = _below(path, entry)
        elif path.is_file():
            return [SourceFile(path, path.name)]
        elif GLOB.search(entry):
            files = _matching(*split_glob(path), entry)
        else:
            found = "is not a file" if path.exists() else "does not exist"
            raise _invalid(f"The conversation file {path} {found}.", _DOWNLOAD if _is_address(path) else _CORRECT_FILES)
    except OSError as error:  # a directory on the way that may not be searched, a name that is too long
        raise unreadable(path, str(error.strerror or error)) from error
    return [SourceFile(_allowed(str(file.path), data_roots, entry), file.name) for file in files]


def _allowed(name: str, data_roots: Sequence[Path] | None, entry: str) -> Path:
    """The real path. Refuses before looking whether it exists, so that nobody can probe for files."""
    try:
        path = Path(name).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a loop of links, a NUL byte
        if data_roots is not None:  # nobody can probe for users either
            raise _outside(entry, data_roots) from error
        raise _invalid(f"{name!r} is not the path of a file: {error}.") from error
    if data_roots is not None and not any(path.is_relative_to(root.resolve()) for root in data_roots):
        raise _outside(entry, data_roots)
    return path


def _matching(directory: Path, pattern: str, entry: str) -> list[SourceFile]:
    found = sorted(path for path in directory.glob(pattern) if path.is_file())
    files = [SourceFile(path, path.relative_to(directory).as_posix()) for path in found]
    if not files:
        raise _invalid(f"No file matches {entry}.")
    return files


def _below(directory: Path, entry: str) -> list[SourceFile]:
    """The data files of a directory."""
    if (directory / "dataset_dict.json").is_file():
        splits = _read_json(directory / "dataset_dict.json").get("splits", [])
        if "train" not in splits:
            raise _invalid(f"{entry} is a saved dictionary of data sets without `train`: {', '.join(splits)}.")
        return [SourceFile(file.path, f"train/{file.name}") for file in _below(directory / "train", f"{entry}/train")]
    if (directory / "state.json").is_file():
        shards = _read_json(directory / "state.json").get("_data_files", [])
        return [SourceFile(directory / shard["filename"], shard["filename"]) for shard in shards]
    paths = data_files(directory)
    if not paths:
        raise _invalid(f"The directory {entry} holds no data file ({', '.join(DATA_SUFFIXES)}).")
    training = training_files(directory, paths)
    if len(training) < len(paths):
        log_event(
            _logger, "info", "train_split_chosen", directory=entry, files=len(training),
            left_out=len(paths) - len(training),
        )  # fmt: skip
    return [SourceFile(path, path.relative_to(directory).as_posix()) for path in training]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise unreadable(path, f"it is not JSON: {error}", "Save the data set again.") from error
    return content if isinstance(content, dict) else {}


def _hub_directory(entry: str, data_roots: Sequence[Path] | None) -> tuple[Path, str | None]:
    """Where a data set of the hub lies on this disk once it is complete, and the files of it that were named."""
    match = _HUB_NAME.fullmatch(entry.removeprefix(HUB_PREFIX)) if entry.startswith(HUB_PREFIX) else None
    if match is None:
        raise _invalid(f"{entry!r} is not of the form {HUB_PREFIX}OWNER/NAME[@REVISION][/FILE-OR-GLOB].")
    name, revision, pattern = match.group(1), match.group(2), match.group(3)
    if pattern and ".." in Path(pattern).parts:
        raise _invalid(f"{entry!r} leads out of the data set.")
    from huggingface_hub import constants

    _allowed(constants.HF_HUB_CACHE, data_roots, entry)
    directory = _download(name, unquote(revision) if revision else None, pattern)
    log_event(_logger, "info", "hub_dataset", name=name, revision=directory.name)
    return directory, pattern


def _download(name: str, revision: str | None, pattern: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    patterns = [pattern] if pattern else [*(f"*{suffix}" for suffix in DATA_SUFFIXES), "*state.json"]
    at = f" at revision {revision!r}" if revision else ""
    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except errors.HFValidationError as error:
        raise _invalid(f"{name!r} is not the name of a data set of a hub.") from error
    except errors.GatedRepoError as error:
        raise _from_hub(
            f"The hub does not give out the data set {name!r}: its terms have to be accepted first.",
            "Accept them on the data set's page, then run `hf auth login` on this machine or set HF_TOKEN.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise _from_hub(f"The hub has no data set {name!r}{at}.", "Correct the revision after the @.") from error
    except errors.RepositoryNotFoundError as error:
        raise _from_hub(
            f"The hub has no data set {name!r}, or it is private.",
            "Check the spelling; for a private one set HF_TOKEN where the target server runs.",
        ) from error
    except connection_failures() as error:
        # Covers an unreachable hub, offline mode without a cached copy, and HTTP errors.
        raise _from_hub(
            f"The data set {name!r}{at} is not complete in the hub cache and could not be downloaded "
            f"({type(error).__name__}).",
            "Check the network, or download it elsewhere and name its directory in data.files.",
        ) from error


def _from_hub(message: str, remedy: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.DATA_INVALID, remedy=remedy)


def _is_address(path: Path) -> bool:
    """Of the web: as a path it has lost one of its slashes."""
    return not {"http:", "https:"}.isdisjoint(path.parts)


def _invalid(message: str, remedy: str = _CORRECT_FILES) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.DATA_INVALID, remedy=remedy)


def _outside(entry: str, data_roots: Sequence[Path]) -> SlipstreamError:
    roots = ", ".join(str(root) for root in data_roots) or "none"
    return SlipstreamError(
        f"{entry!r} lies outside the directories that this target server may read data from ({roots}).",
        reason=Reason.PATH_NOT_ALLOWED,
        remedy="Move the file there, or start the target server with --data-root for its directory.",
    )
