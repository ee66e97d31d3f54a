"""The drafter that a new run begins with, settled when the run is created: later a name could mean another one.

RUN[@STEP] becomes the path of a checkpoint that a trainer has reported, OWNER/NAME a commit of the hub.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.orm import Session

from control_api.store import checkpoints, events, runs
from control_api.store.database import Database
from control_api.store.tables import Checkpoint, Run, Trainer
from slipstream.checkpoint_name import reported_steps
from slipstream.drafter_name import RunName, also_no_path, drafter_name
from slipstream.errors import SlipstreamError
from slipstream.hub_drafter import HubDrafter, pinned
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from slipstream.run_spec.suggestions import nearest


@dataclass(frozen=True)
class SettledDrafter:
    """What a name in a definition was found to mean."""

    named: str
    init_from: str
    """As the definition of the run has it from now on."""
    storage: str | None
    """That holds the checkpoint; None: a hub has the drafter."""

    def note(self, session: Session, run: Run, *, now: float) -> None:
        """Write it into the run's events; only a trainer that shares the storage may take the run."""
        run.storage = self.storage
        if self.named == self.init_from:
            return
        words = f"drafter.init_from {self.named} is {self.init_from}"
        data = {"named": self.named, "init_from": self.init_from}
        events.append(session, run.id, events.NewEvent("FIRST_DRAFTER_FOUND", words, data), now=now)


def settle_first_drafter(
    spec: RunSpec, database: Database, present: Sequence[Trainer]
) -> tuple[RunSpec, SettledDrafter | None]:
    """The definition with what its `drafter.init_from` means, and that; None where it names none, or a path.

    Args:
        spec: of a run that is to be created.
        database: to find a run in; not held open while a hub is asked, which may take seconds.
        present: the trainers that are heard of. Where one is on another machine, the hub may give it what it does not
            give this one.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, there is no such drafter.
    """
    named = spec.drafter.init_from
    meant = None if named is None else drafter_name(named, None)
    if named is None or meant is None or isinstance(meant, Path):
        return spec, None
    if isinstance(meant, RunName):
        with database.read() as session:
            checkpoint = _checkpoint(session, named, meant)
        found = SettledDrafter(named, checkpoint.path, checkpoint.storage)
    else:
        elsewhere = any(one.host != socket.gethostname() for one in present)
        found = SettledDrafter(named, _commit(named, meant, may_fail=elsewhere), None)
    return spec.model_copy(update={"drafter": spec.drafter.model_copy(update={"init_from": found.init_from})}), found


def _commit(named: str, drafter: HubDrafter, *, may_fail: bool) -> str:
    try:
        with also_no_path(named):
            return str(pinned(drafter))
    except SlipstreamError:
        if not may_fail:
            raise
        return named


def _checkpoint(session: Session, named: str, meant: RunName) -> Checkpoint:
    run = runs.find(session, meant.run)
    if run is None:
        raise _no_run(session, named, meant.run)
    found = {one.step: one for one in checkpoints.every(session, run.id)}
    best = checkpoints.best(session, run.id)
    paths = {step: one.path for step, one in found.items()}
    try:
        step = reported_steps(f"run {run.name}", paths, None if best is None else best.step).choose(meant.choice)
    except SlipstreamError as error:
        message = f"drafter.init_from is {named!r}, and {error.message}"
        raise SlipstreamError(message, reason=error.reason, remedy=error.remedy) from error
    return found[step]


def _no_run(session: Session, named: str, run: str) -> SlipstreamError:
    close = nearest(run, [one.name for one in runs.page(session, after=0, size=1000)])
    return SlipstreamError(
        f"drafter.init_from is {named!r}, and there is neither a path of this name nor a run {run!r}.",
        reason=Reason.CHECKPOINT_INVALID,
        remedy=(f"Did you mean {close}? " if close else "")
        + "Name a run that has a checkpoint, a path (a relative one starts at the recipe's directory, or at the first "
        "--data-root), or OWNER/NAME of a hub.",
    )
