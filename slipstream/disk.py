"""Files that are replaced whole or not at all, and what a disk refuses in words."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def disk_errors_in_words(path: Path, *, flag: str, when_full: str = "Free some space.") -> Iterator[None]:
    """Turn what the file system refuses while `path` is written into a SlipstreamError.

    Args:
        path: that the user knows of.
        flag: of the command line, that names another place.
        when_full: the remedy for a full disk.

    Raises:
        SlipstreamError: DISK_FULL for a full disk or an exhausted quota, else PATH_NOT_ALLOWED.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise SlipstreamError(
                f"The disk is full: {path} could not be written ({error.strerror}).",
                reason=Reason.DISK_FULL,
                remedy=when_full,
            ) from error
        raise SlipstreamError(
            f"{path} could not be written: {error.strerror or error}.",
            reason=Reason.PATH_NOT_ALLOWED,
            remedy=f"Give a directory that this user may write, with {flag}.",
        ) from error


def require_place(path: Path, *, flag: str, directory: bool = False) -> None:
    """Refuse what could not be written once the work is done, before it begins. Nothing is made.

    Args:
        path: a file, that may be there and is replaced then.
        flag: of the command line, that names it.
        directory: it is to be a directory instead, that may be there.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED.
    """
    if path.exists() and path.is_dir() != directory:
        problem = f"{path} is {'a file, expected a directory' if directory else 'a directory, expected a file'}"
    elif path.exists() and not os.access(path, os.W_OK):
        problem = f"{path} may not be written by this user"
    elif not path.exists() and not path.absolute().parent.is_dir():
        problem = f"there is no directory {path.absolute().parent} for {path.name}"
    elif not path.exists() and not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        problem = f"{path.absolute().parent} may not be written by this user"
    else:
        return
    raise SlipstreamError(
        f"{flag}: {problem}",
        reason=Reason.PATH_NOT_ALLOWED,
        remedy=f"Make the directory first, or give another place with {flag}.",
    )


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` so that a reader, or a crash, sees either the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
