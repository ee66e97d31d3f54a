"""Runs: created, looked up, moved from state to state, deleted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from uuid import uuid4

from sqlalchemy import delete as delete_rows
from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from control_api.store import events
from control_api.store.database import touch
from control_api.store.tables import Assignment, Run, StateChange, Target, UsedDirectory
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.states import AT_REST, DESIRED, RunState

_LONGEST_NAME = 63


def find(session: Session, name: str) -> Run | None:
    """By name."""
    return session.scalar(select(Run).where(Run.name == name))


def create(session: Session, *, spec: dict[str, Any], target: Target, note: str, now: float) -> Run:
    """A new run in PENDING; its name must be free."""
    name = spec["name"]
    run = Run(
        name=name,
        directory=_new_directory(session, name),
        uid=uuid4().hex,
        target=target,
        spec=spec,
        note=note,
        state=RunState.PENDING,
        desired_state=DESIRED[RunState.PENDING],
        conditions=[],
        steps=0,
        created_at=now,
        updated_at=now,
    )
    session.add(run)
    session.flush()
    session.add(UsedDirectory(directory=run.directory))
    _record(session, run, Cause("create"), now)
    return run


@dataclass(frozen=True)
class Cause:
    """Why a run changes its state."""

    name: str
    """A verb, or an event of the system."""
    reason: Reason | None = None
    message: str = ""


def move(session: Session, run: Run, state: RunState, cause: Cause, *, now: float) -> None:
    """Put the run into `state` and write that into its history."""
    run.state = state
    run.desired_state = DESIRED[state]
    run.reason = cause.reason if state is RunState.FAILED else None
    run.message = cause.message if state is RunState.FAILED else ""
    run.updated_at = now
    if state in AT_REST:
        run.conditions = []
    _record(session, run, cause, now)


def page(session: Session, *, after: int, size: int, state: RunState | None = None) -> Sequence[Run]:
    """In the order of creation."""
    query = select(Run).where(Run.id > after).order_by(Run.id).limit(size)
    return session.scalars(query if state is None else query.where(Run.state == state)).all()


def unsettled(session: Session) -> Sequence[Run]:
    """Runs that the reconciler looks at: those not at rest, oldest first, and any that a trainer still holds."""
    held = exists().where(Assignment.run_id == Run.id, Assignment.ended_at.is_(None))
    return session.scalars(select(Run).where(Run.state.not_in(AT_REST) | held).order_by(Run.id)).all()


def history(session: Session, run: Run) -> Sequence[StateChange]:
    """Oldest first."""
    return session.scalars(select(StateChange).where(StateChange.run_id == run.id).order_by(StateChange.id)).all()


def delete(session: Session, run: Run) -> None:
    """Forget it and all it left here."""
    touch(session, run.id)
    # Not through the unit of work: a run may have a million metrics, and the database cascades by itself.
    session.execute(delete_rows(Run).where(Run.id == run.id))


def _record(session: Session, run: Run, cause: Cause, now: float) -> None:
    change = StateChange(run_id=run.id, state=run.state, cause=cause.name, reason=cause.reason, message=cause.message)
    change.time = now
    session.add(change)
    data = {"state": run.state, "cause": cause.name} | ({"reason": cause.reason} if cause.reason else {})
    events.append(session, run.id, events.NewEvent("STATE_CHANGED", cause.message, data), now=now)


def _new_directory(session: Session, name: str) -> str:
    return next(one for one in _candidates(name) if session.get(UsedDirectory, one) is None)


def _candidates(name: str) -> Iterator[str]:
    yield name
    for number in count(2):
        ending = f".{number}"
        yield name[: _LONGEST_NAME - len(ending)] + ending
