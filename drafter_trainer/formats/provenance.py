"""`slipstream.json` beside the exported files: what they were made from, and how they were tested."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

import slipstream
from drafter_trainer.checkpoint_state import file_checksum
from slipstream.disk import write_atomically
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

PROVENANCE = "slipstream.json"
FORMAT_VERSION = 1
_NOT_COMPARED = ("README.md", PROVENANCE)


class FileFacts(BaseModel):
    """Of one file, when it was written."""

    model_config = ConfigDict(frozen=True)

    size: int
    crc32c: int


class Provenance(BaseModel):
    """Everything in the file. Unknown keys are left alone, so that a newer minor addition does not matter."""

    model_config = ConfigDict(frozen=True)

    format_version: int
    slipstream: str
    """The version that wrote it."""
    format: str
    run: str
    step: int
    """Steps that were trained."""
    dtype: str
    target_fingerprint: str
    spec: dict[str, Any]
    """The run definition."""
    self_test: dict[str, Any] | None
    """None: left out on demand."""
    files: dict[str, FileFacts]


def write_provenance(directory: Path, facts: dict[str, Any]) -> None:
    """Write it, with size and checksum of every file that lies in the directory by now.

    Raises:
        OSError: the file system refused.
    """
    names = sorted(path.name for path in directory.iterdir() if path.name not in _NOT_COMPARED)
    checksums = {name: file_checksum(directory / name) for name in names}
    files = {name: FileFacts(size=size, crc32c=checksum) for name, (size, checksum) in checksums.items()}
    record = Provenance(format_version=FORMAT_VERSION, slipstream=slipstream.__version__, files=files, **facts)
    write_atomically(directory / PROVENANCE, record.model_dump_json(indent=2) + "\n")


def read_provenance(directory: Path) -> Provenance | None:
    """Read it and compare the files with it; None where Slipstream did not write the directory.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, it is of a newer version, not readable, or a file has changed since.
    """
    path = directory / PROVENANCE
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values["format_version"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise _invalid(
                f"{path} has format version {version}, expected at most {FORMAT_VERSION}", "Update Slipstream."
            )
        record = Provenance.model_validate(values)
    except (OSError, ValidationError, ValueError, KeyError, TypeError) as error:
        raise _invalid(f"{path} cannot be understood ({error})", "Export again, or remove this file.") from error
    for name, facts in record.files.items():
        try:
            found = file_checksum(directory / name)
        except OSError as error:
            raise _invalid(f"{directory / name} cannot be read ({error.strerror})", "Export again.") from error
        if found != (facts.size, facts.crc32c):
            raise _invalid(
                f"{directory / name} is not what was exported: {found[0]} bytes with checksum {found[1]:08x}, "
                f"expected {facts.size} with {facts.crc32c:08x}",
                f"Copy or export it again; if you changed it on purpose, remove {PROVENANCE}.",
            )
    return record


def _invalid(message: str, remedy: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.CHECKPOINT_INVALID, remedy=remedy)
