"""Which drafter step 0 of a run begins with, and `first_drafter.json`, which keeps it beside the run.

A name may mean another drafter later: the newest checkpoint of a run, a branch of a hub. A start that comes after a
kill before the first checkpoint begins with what the record names, and so does what it would have done.
"""

import json
import logging
from pathlib import Path
from typing import Any

from drafter_trainer.checkpoint_state import file_checksum, newest_checkpoint, read_state
from drafter_trainer.formats.provenance import read_provenance
from drafter_trainer.run_directory import RunDirectory
from slipstream.checkpoint_name import MANIFEST
from slipstream.errors import SlipstreamError
from slipstream.first_drafter import find_first_drafter
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event

RECORD = "first_drafter.json"

_log = logging.getLogger(__name__)


class FirstDrafter:
    """The drafter that a definition's `drafter.init_from` names, as this process found it."""

    def __init__(self, run: RunDirectory, named: str) -> None:
        self._run = run
        self._named = named
        self._found: Path | None = None
        self._record: dict[str, Any] = {}

    def find(self) -> Path:
        """Directory of one checkpoint, or of a drafter in one of the formats; looked for again once it is gone.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID, there is none.
        """
        if self._found is None or not self._found.is_dir():
            earlier = self._recorded()
            found = self._newest() if earlier is None else Path(earlier["directory"])
            # Now: a run prunes its checkpoints.
            weights = _weights(found)
            if earlier is not None and earlier.get("crc32c") != weights:
                log_event(_log, "warning", "first_drafter_has_changed", named=self._named, directory=str(found))
            self._record = {"named": self._named, "directory": str(found), **_origin(found), "crc32c": weights}
            self._found = found
            log_event(_log, "info", "first_drafter", named=self._named, directory=str(found))
        return self._found

    def to_json(self) -> str:
        """What was found last, by name, place and content."""
        return json.dumps(self._record, indent=2)

    def _newest(self) -> Path:
        found = find_first_drafter(self._named, self._run.root.absolute().parent).absolute()
        checkpoints = found / "checkpoints"
        return (newest_checkpoint(checkpoints) or found) if checkpoints.is_dir() else found

    def _recorded(self) -> dict[str, Any] | None:
        """The record of an earlier start of the run, if what that has begun with is still there."""
        try:
            record: dict[str, Any] = json.loads((self._run.root / RECORD).read_bytes())
            named, directory = record["named"], Path(record["directory"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if named != self._named:
            return None
        if not directory.is_dir():
            log_event(_log, "warning", "first_drafter_is_gone", named=named, directory=str(directory))
            return None
        return record


def _weights(directory: Path) -> dict[str, int]:
    """Checksums of its tensors, by file."""
    try:
        return {file.name: file_checksum(file)[1] for file in sorted(directory.glob("*.safetensors"))}
    except OSError as error:
        raise SlipstreamError(
            f"the drafter in {directory} cannot be read: {error.strerror}",
            reason=Reason.CHECKPOINT_INVALID,
            remedy="Let the trainer's user read it; of a run that trains, name a checkpoint that it keeps: RUN@best.",
        ) from error


def _origin(directory: Path) -> dict[str, Any]:
    """Of a checkpoint or an export its run and the steps that were trained; of a hub's drafter the commit."""
    if (directory / MANIFEST).exists():
        state = read_state(directory)
        return {"run": state.run, "step": state.cursor.next_step, "target_fingerprint": state.target_fingerprint}
    commit = {"commit": directory.name} if directory.parent.name == "snapshots" else {}
    made_from = read_provenance(directory)
    if made_from is None:
        return commit
    return {"run": made_from.run, "step": made_from.step, "target_fingerprint": made_from.target_fingerprint} | commit
