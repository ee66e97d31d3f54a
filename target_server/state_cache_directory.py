"""The directory of a cache of hidden states: one server's at a time, of one format, or refused in words."""

import fcntl
import json
import os
from pathlib import Path

from slipstream.disk import disk_errors_in_words, write_atomically
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.state_cache_segment import DATA_SUFFIX, INDEX_SUFFIX

FLAG = "--state-cache"
FORMAT = "slipstream.state-cache.v1"
FORMAT_FILE = "format.json"
LOCK_FILE = "lock"
_DRAFTS = f".{FORMAT_FILE}."
FIXED_BYTES = 2 * 4096
"""What both of them take."""


def open_directory(directory: Path) -> int:
    """Make the directory where it is missing and take it for this process; returns the lock's file descriptor.

    The kernel drops the lock with the process, however that ends.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED when another server uses it, it holds other files or a cache of another
            format; PATH_NOT_ALLOWED when it cannot be written; DISK_FULL.
    """
    with disk_errors_in_words(
        directory, flag=FLAG, when_full=f"Free some space, or name a directory on another disk with {FLAG}."
    ):
        directory.mkdir(parents=True, exist_ok=True)
        _refuse_other_files(directory)
        fd = _lock(directory)
        try:
            _check_format(directory)
        except BaseException:
            os.close(fd)
            raise
    return fd


def segment_numbers(directory: Path) -> list[int]:
    """Of all segments, oldest first."""
    stems = {path.stem for suffix in (DATA_SUFFIX, INDEX_SUFFIX) for path in directory.glob(f"*{suffix}")}
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def _refuse_other_files(directory: Path) -> None:
    """A cache deletes files; nobody's else may be among them."""
    names = {path.name for path in directory.iterdir()}
    # What a process leaves that is killed while it makes a cache.
    others = sorted(name for name in names if name != LOCK_FILE and not name.startswith(_DRAFTS))
    if others and FORMAT_FILE not in names:
        raise _unsupported(
            f"{directory} holds other files ({', '.join(others[:3])}), and no cache of hidden states.",
            f"Name an empty or a new directory with {FLAG}.",
        )


def _check_format(directory: Path) -> None:
    path = directory / FORMAT_FILE
    if not path.exists():
        write_atomically(path, json.dumps({"format": FORMAT}) + "\n")
        return
    try:
        saved = json.loads(path.read_bytes())["format"]
    except (ValueError, KeyError, TypeError):
        saved = "that cannot be read"
    if saved != FORMAT:
        raise _unsupported(
            f"{directory} is a cache of format {saved}; this version of Slipstream knows {FORMAT}.",
            f"Delete it, since a cache holds nothing that cannot be computed again, or name another with {FLAG}.",
        )
    for draft in directory.glob(f"{_DRAFTS}*"):
        draft.unlink(missing_ok=True)


def _lock(directory: Path) -> int:
    fd = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise _unsupported(
            f"The cache {directory} is in use by another target server (process {owner}).",
            f"Stop that one, or name another directory with {FLAG}: every server needs its own.",
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _unsupported(message: str, remedy: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.ENVIRONMENT_UNSUPPORTED, remedy=remedy)
