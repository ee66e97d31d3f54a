"""Events of a run, in one order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from control_api.store.database import touch
from control_api.store.tables import Event

CONTROL_API = "control-api"


@dataclass(frozen=True)
class NewEvent:
    """What happened."""

    type: str
    message: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    source: str = CONTROL_API
    source_id: str | None = None
    """The source's own id: an event with one that is known already is not added again."""


def append(session: Session, run_id: int, event: NewEvent, *, now: float) -> None:
    """Add an event, unless its source id is known."""
    row = {"source": event.source, "source_id": event.source_id, "type": event.type, "message": event.message}
    statement = insert(Event).values(run_id=run_id, data=dict(event.data), time=now, **row)
    session.execute(statement.on_conflict_do_nothing())
    touch(session, run_id)


def page(session: Session, run_id: int, *, after: int, size: int) -> Sequence[Event]:
    """Oldest first."""
    query = select(Event).where(Event.run_id == run_id, Event.id > after).order_by(Event.id).limit(size)
    return session.scalars(query).all()


def newest_id(session: Session, run_id: int) -> int:
    """0 when there is none."""
    return session.scalar(select(func.max(Event.id)).where(Event.run_id == run_id)) or 0
