"""The forms that an entry of `data.files` has: a path, a glob, a directory, or a data set of a hub."""

import re
from collections.abc import Iterable
from pathlib import Path

HUB_SCHEME = "hf://"
GLOB = re.compile(r"[*?\[]")


def is_hub_name(entry: str) -> bool:
    """Whether the entry names a data set of a hub, which is no path."""
    return entry.startswith(HUB_SCHEME)


def split_glob(path: Path) -> tuple[Path, str]:
    """The directory before the first part with a wildcard, and the rest."""
    first = next(index for index, part in enumerate(path.parts) if GLOB.search(part))
    return Path(*path.parts[:first]), str(Path(*path.parts[first:]))


def directories_of(entries: Iterable[str]) -> list[Path]:
    """Directories that hold what the entries name, in order; none for a hub name: its cache holds much else."""
    return list(dict.fromkeys(_directory_of(Path(entry)) for entry in entries if not is_hub_name(entry)))


def _directory_of(path: Path) -> Path:
    if path.is_dir():
        return path
    return split_glob(path)[0] if GLOB.search(str(path)) and not path.exists() else path.parent
