"""A directory that appears whole under its name, or not at all: it is filled under another name and renamed."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slipstream.disk import disk_errors_in_words, sync_directory
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


def require_free(path: Path, *, replace: bool) -> None:
    """Refuse a name that is taken, before anything costly is done.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED.
    """
    if path.is_dir() and not path.is_symlink() and (replace or not any(path.iterdir())):
        return
    if os.path.lexists(path):
        what = "a directory that is not empty" if path.is_dir() else "no directory"
        raise SlipstreamError(
            f"{path} exists already and is {what}, expected a new name",
            reason=Reason.PATH_NOT_ALLOWED,
            remedy="Give another --output, or replace that directory with --force.",
        )


@contextmanager
def new_directory(path: Path, *, replace: bool) -> Iterator[Path]:
    """An empty directory beside `path`, which becomes `path` when the block is left without an error.

    Whoever is killed meanwhile leaves `.unfinished-…`, which the next one of the same name removes.

    Args:
        path: its parents are made.
        replace: a directory of this name makes room, once the new one is complete.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, the name is taken or cannot be written; DISK_FULL.
    """
    path = path.absolute()
    require_free(path, replace=replace)
    unfinished = path.parent / f".unfinished-{path.name}.{os.getpid()}"
    replaced = path.parent / f".replaced-{path.name}.{os.getpid()}"
    with disk_errors_in_words(path, flag="--output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        unfinished.mkdir()
        try:
            yield unfinished
            sync_directory(unfinished)
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
