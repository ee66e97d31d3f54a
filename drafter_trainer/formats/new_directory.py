"""A directory that appears whole under its name, or not at all: it is filled under another name and renamed."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drafter_trainer.formats.provenance import PROVENANCE
from slipstream.disk import disk_errors_in_words, sync_directory
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


def require_free(path: Path, *, replace: bool) -> None:
    """Refuse a name that is taken, before anything costly is done; with `replace`, unless it is an earlier export.

    A run directory, a target's or somebody's home is never replaced, for what makes room is deleted.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED.
    """
    with disk_errors_in_words(path, flag="--output"):
        if not _is_taken(path):
            return
        is_export = path.is_dir() and not path.is_symlink() and (path / PROVENANCE).is_file()
        what = "a directory that is not empty" if path.is_dir() else "no directory"
    if not is_export:
        raise SlipstreamError(
            f"{path} exists already and is {what}, expected a new name",
            reason=Reason.PATH_NOT_ALLOWED,
            remedy=f"Give another --output; --force replaces only what was exported, with {PROVENANCE} in it.",
        )
    if not replace:
        raise SlipstreamError(
            f"{path} exists already and is {what}, expected a new name",
            reason=Reason.PATH_NOT_ALLOWED,
            remedy="Give another --output, or replace that export with --force.",
        )


@contextmanager
def new_directory(path: Path, *, replace: bool) -> Iterator[Path]:
    """An empty directory beside `path`, which becomes `path` when the block is left without an error.

    Whoever is killed meanwhile leaves `.unfinished-…`, which the next one of the same name removes.

    Args:
        path: its parents are made.
        replace: an earlier export of this name makes room, once the new one is complete.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, the name is taken or cannot be written; DISK_FULL.
    """
    path = path.absolute()
    unfinished = path.parent / f".unfinished-{path.name}.{os.getpid()}"
    replaced = path.parent / f".replaced-{path.name}.{os.getpid()}"
    with disk_errors_in_words(path, flag="--output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        require_free(path, replace=replace)
        unfinished.mkdir()
        try:
            yield unfinished
            sync_directory(unfinished)
            # Another export of this name may have been faster.
            require_free(path, replace=replace)
            if path.is_dir():
                path.rename(replaced)
            unfinished.rename(path)
            sync_directory(path.parent)
        except BaseException:
            if replaced.is_dir() and not path.exists():
                replaced.rename(path)
            raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(replaced, ignore_errors=True)


def _is_taken(path: Path) -> bool:
    """An empty directory is free."""
    is_directory = path.is_dir() and not path.is_symlink()
    return any(path.iterdir()) if is_directory else os.path.lexists(path)


def _remove_leftovers(path: Path) -> None:
    """Of processes that were killed: a replaced directory whose successor never came is put back."""
    name = re.compile(rf"\.(unfinished|replaced)-{re.escape(path.name)}\.(\d+)")
    for entry in list(path.parent.iterdir()):
        match = name.fullmatch(entry.name)
        if match is None or _is_alive(int(match[2])):
            continue
        if match[1] == "replaced" and not os.path.lexists(path):
            entry.rename(path)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        return True
    return False
