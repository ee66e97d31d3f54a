"""The file that answers are written to, and beside it the settings they are made with: one that was begun goes on."""

import json
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from slipstream.answers_settings import read_settings, settings_beside
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

BATCH_ON_CPU = 16
BATCH_ON_GPU = 256
"""Prompts at once: a GPU decodes many about as fast as one."""


def default_batch(output: Path, device: str) -> int:
    """Prompts at once where nobody says: as many as the file was begun with, which decide its answers; else by the
    device (`cpu`, `cuda`, `cuda:N`)."""
    begun = read_settings(output).get("batch") if _is_begun(output) else None
    if isinstance(begun, int) and begun > 0:
        return begun
    return BATCH_ON_GPU if device.startswith("cuda") else BATCH_ON_CPU


def append_rows(file: IO[bytes], rows: Sequence[bytes]) -> None:
    """They are on the disk when this returns. Raises SlipstreamError (DISK_FULL)."""
    try:
        file.write(b"".join(rows))
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise _not_written(file.name, error) from error


def whole_rows(file: IO[bytes]) -> int:
    """Rows that were written whole; a rest behind the last line end is cut off."""
    file.seek(0)
    rows, end = 0, 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        rows, end = rows + 1, end + len(line)
    file.truncate(end)
    return rows


def keep_rows(file: IO[bytes], rows: int) -> None:
    """The first so many; the rest is cut off."""
    file.seek(0)
    file.truncate(sum(len(line) for line in islice(file, rows)))


def require_writable(output: Path) -> None:
    """Asked before a model is loaded. Makes the directory of `output`.

    Raises:
        SlipstreamError: SPEC_INVALID, no file can be there; DATA_INVALID, another file is.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        why = "it is a directory" if output.is_dir() else ""
        if not why and not os.access(output if output.exists() else output.parent, os.W_OK):
            why = "writing there is not permitted"
    except OSError as error:
        why = str(error.strerror or error)
    if why:
        raise SlipstreamError(
            f"The answers cannot be written to {output}: {why}.",
            reason=Reason.SPEC_INVALID,
            remedy="Name a file in a writable directory, with --to or as eval.heldout.",
        )
    if _is_begun(output) and not settings_beside(output).exists():
        raise SlipstreamError(
            f"{output} is there already, and holds no answers that could be gone on with: "
            f"{settings_beside(output).name} is not beside it.",
            reason=Reason.DATA_INVALID,
            remedy="Name another file, with --to or as eval.heldout.",
        )


def _is_begun(output: Path) -> bool:
    return output.exists() and output.stat().st_size > 0


def check_settings(output: Path, settings: dict[str, Any]) -> None:
    """Record what the answers are made with; of a file that was begun, compare it.

    Raises:
        SlipstreamError: as `require_writable`, or DATA_INVALID, it was begun with other settings; DISK_FULL.
    """
    require_writable(output)
    beside = settings_beside(output)
    if not _is_begun(output):
        try:
            beside.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        except OSError as error:
            raise _not_written(str(beside), error) from error
        return
    before = read_settings(output)
    differences = [key for key in sorted(before.keys() | settings.keys()) if before.get(key) != settings.get(key)]
    if differences:
        raise SlipstreamError(
            f"{output} was begun with other settings: {', '.join(differences)}.",
            reason=Reason.DATA_INVALID,
            remedy=f"Use the settings in {beside.name}; or delete the answers, or name another file, with --to or as "
            "eval.heldout.",
        )


def _not_written(name: str, error: OSError) -> SlipstreamError:
    return SlipstreamError(
        f"{name} cannot be written: {error.strerror}.",
        reason=Reason.DISK_FULL,
        remedy="Make room and start again: what was answered so far is kept.",
    )
