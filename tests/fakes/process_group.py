"""Which processes that a process under test started are still there."""

import os
import select
from pathlib import Path


def survivors(group: int, *, seconds: float = 10.0) -> list[str]:
    """Command lines of the processes of a group that still run, after each was given `seconds` to end by itself.

    `ManagedProcess` starts every process as the leader of a group of its own; its children are in it.
    """
    return [command for pid, command in _members(group) if not _ended(pid, seconds)]


def _members(group: int) -> list[tuple[int, str]]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            # Fields behind the name, which may hold blanks: state, parent, group.
            state, _, process_group, *_ = (directory / "stat").read_text().rpartition(")")[2].split()
            command = (directory / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it ended meanwhile
            continue
        if int(process_group) == group and state != "Z":
            found.append((int(directory.name), command))
    return found


def _ended(pid: int, seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)
