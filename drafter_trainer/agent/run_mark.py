"""Whose a run's directory is: the mark in it, the run's uid, which no run of another database has.

A control API whose database was lost, or another one that uses the same directory of runs, gives names anew that were
used here. Their checkpoints and metrics are not the new run's.
"""

import shlex
from pathlib import Path

from slipstream.disk import disk_errors_in_words, write_atomically
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

_MARK = "run-uid"


def is_of_another_run(directory: Path, uid: str | None) -> bool:
    """Whether another run than `uid` has left what lies in the directory; None (an older control API) may have all.

    True also where that cannot be found out; `mark` says why.
    """
    try:
        return uid is not None and not _is_free(directory, uid)
    except OSError:
        return True


def mark(directory: Path, uid: str | None) -> None:
    """Make the directory, if it is missing, and mark it as this run's.

    Raises:
        SlipstreamError: NAME_TAKEN, it is another run's; PATH_NOT_ALLOWED, DISK_FULL.
    """
    with disk_errors_in_words(directory, flag="--runs"):
        directory.mkdir(parents=True, exist_ok=True)
        if uid is None:
            return
        if not _is_free(directory, uid):
            raise SlipstreamError(
                f"{directory} holds what another run has left, of which this control API knows nothing.",
                reason=Reason.NAME_TAKEN,
                remedy="Create a run of another name; or move that directory away and resume this run; or let it go on "
                f"with what is there: `echo {uid} > {shlex.quote(str(directory / _MARK))}`, then resume it.",
            )
        if not (directory / _MARK).exists():
            write_atomically(directory / _MARK, uid + "\n")


def _is_free(directory: Path, uid: str) -> bool:
    try:
        return (directory / _MARK).read_text(encoding="utf-8", errors="replace").strip() == uid
    except FileNotFoundError:
        metrics = directory / "metrics.jsonl"
        return not any(directory.glob("checkpoints/step-*")) and not (metrics.exists() and metrics.stat().st_size)
