"""Subscriptions of runs at target servers: remembered from the first trainer on, until a target has closed them."""

from collections.abc import Collection, Sequence

from sqlalchemy import delete, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from control_api.store.tables import Assignment, Run, Subscription, Target

_AT_ONCE = 100


def name_of(run: Run) -> str:
    """As the target names that of `runs/{directory}`, which the trainer opens.

    A directory is given to one run for ever, so no later run has this subscription.
    """
    return f"subscriptions/{run.directory}"


def remember(session: Session, run: Run) -> None:
    """A trainer is about to open it at the run's target."""
    statement = insert(Subscription).values(target_id=run.target_id, run_id=run.id, name=name_of(run))
    session.execute(statement.on_conflict_do_nothing())


def to_close(session: Session, target: Target) -> Sequence[str]:
    """Those whose run was deleted, oldest first; the first few."""
    query = select(Subscription.name).where(Subscription.target_id == target.id, Subscription.run_id.is_(None))
    return session.scalars(query.order_by(Subscription.id).limit(_AT_ONCE)).all()


def forget(session: Session, target: Target, closed: Collection[str]) -> None:
    """The target has closed them, or does not know them."""
    session.execute(
        delete(Subscription).where(
            Subscription.target_id == target.id, Subscription.run_id.is_(None), Subscription.name.in_(closed)
        )
    )


def in_use(session: Session, target: Target) -> Sequence[Run]:
    """Runs of the target that a trainer holds."""
    held = select(Assignment.run_id).where(Assignment.ended_at.is_(None))
    return session.scalars(select(Run).where(Run.target_id == target.id, Run.id.in_(held)).order_by(Run.id)).all()
