"""The directory in which the ranks of a server's engines find each other; what a killed server left is removed.

Its owner holds a lock on it, which the system takes back with the process, however that ends.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "slipstream-engines-"


class MeetingPlaces:
    """A directory of this process, with a place for every engine that is started."""

    def __init__(self, root: Path | None = None) -> None:
        """`root`: where it is made; default: the system's directory for temporary files."""
        while True:
            self.directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            # A cleaner that was there before the lock has removed it: then once more.
            with suppress(FileNotFoundError):
                self._lock = _open(self.directory)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.directory.exists():
                    break
                os.close(self._lock)
        self._starts = 0

    def next(self) -> Path:
        """A file that no engine has met at before; not thread-safe."""
        self._starts += 1
        return self.directory / str(self._starts)

    def close(self) -> None:
        """Remove it. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_stale_places(root: Path | None = None) -> list[str]:
    """Remove the directories of dead processes; returns their names."""
    removed = []
    for directory in sorted((root or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*")):
        try:
            descriptor = _open(directory)
        except OSError:  # gone meanwhile, or another user's: not ours to judge
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory.name)
        except BlockingIOError:  # the owner lives
            continue
        finally:
            os.close(descriptor)
    return removed


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
