"""Targets: registered, looked up, forgotten."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from control_api.store.tables import Run, Target


def find(session: Session, name: str) -> Target | None:
    """By name."""
    return session.scalar(select(Target).where(Target.name == name))


def meant(session: Session, name: str | None) -> Target | None:
    """By name, or the only one; None where there is none, or no name and several."""
    found = [one for one in every(session) if name in (None, one.name)]
    return found[0] if len(found) == 1 else None


def add(session: Session, *, name: str, address: str, now: float) -> Target:
    """Register; the name must be free."""
    target = Target(name=name, address=address, created_at=now)
    session.add(target)
    session.flush()
    return target


def page(session: Session, *, after: int, size: int) -> Sequence[Target]:
    """In the order of registration."""
    return session.scalars(select(Target).where(Target.id > after).order_by(Target.id).limit(size)).all()


def every(session: Session) -> Sequence[Target]:
    """All of them."""
    return session.scalars(select(Target).order_by(Target.id)).all()


def runs_of(session: Session, target: Target) -> Sequence[str]:
    """Names of the runs that name it, first few."""
    return session.scalars(select(Run.name).where(Run.target_id == target.id).order_by(Run.id).limit(4)).all()
