"""Trainers and their assignments."""

from collections.abc import Sequence

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from control_api.store import events, subscriptions
from control_api.store.tables import Assignment, Run, Trainer


def find(session: Session, name: str) -> Trainer | None:
    """By name."""
    return session.scalar(select(Trainer).where(Trainer.name == name, ~Trainer.forgotten))


def find_or_new(session: Session, name: str, *, now: float) -> Trainer:
    """The row for a trainer that registers: its own, also when it was forgotten meanwhile, or a new one."""
    row = session.scalar(select(Trainer).where(Trainer.name == name))
    if row is None:
        row = Trainer(name=name, registered_at=now)
        session.add(row)
    elif row.forgotten:
        row.forgotten, row.registered_at = False, now
    return row


def forget(trainer: Trainer) -> None:
    """Show it no more, and give it nothing, until it registers again; its attempts keep its name."""
    trainer.forgotten = True


def has_left(trainer: Trainer) -> bool:
    """Whether it said goodbye: it was told to leave, and holds nothing."""
    return trainer.leaving and not trainer.assignments


def page(session: Session, *, after: int, size: int) -> Sequence[Trainer]:
    """In the order of their first registration."""
    return session.scalars(
        select(Trainer).where(Trainer.id > after, ~Trainer.forgotten).order_by(Trainer.id).limit(size)
    ).all()


def known(session: Session) -> Sequence[Trainer]:
    """All that are not forgotten, in the order of their first registration."""
    return session.scalars(select(Trainer).where(~Trainer.forgotten).order_by(Trainer.id)).all()


def present(session: Session) -> Sequence[Trainer]:
    """All that have not said goodbye, whether they have work or not."""
    return [one for one in known(session) if not has_left(one)]


def at_work(session: Session) -> dict[int, str]:
    """Ids of the trainers that have a run, and its name."""
    query = select(Assignment.trainer_id, Run.name).join(Run).where(Assignment.ended_at.is_(None))
    return {row.trainer_id: row.name for row in session.execute(query)}


def open_assignment(session: Session, trainer: Trainer) -> Assignment | None:
    """What the trainer works on."""
    return session.scalar(select(Assignment).where(Assignment.trainer_id == trainer.id, Assignment.ended_at.is_(None)))


def open_assignments(session: Session, run: Run) -> Sequence[Assignment]:
    """Who works on the run."""
    return session.scalars(
        select(Assignment).where(Assignment.run_id == run.id, Assignment.ended_at.is_(None)).order_by(Assignment.id)
    ).all()


def assignment_of(session: Session, trainer: Trainer, assignment_id: int) -> Assignment | None:
    """An assignment that this trainer has, or had."""
    assignment = session.get(Assignment, assignment_id)
    return assignment if assignment is not None and assignment.trainer_id == trainer.id else None


def was_detached(session: Session, run: Run, trainer: Trainer) -> bool:
    """Whether a person took the trainer off the run the last time it worked on it."""
    last = session.scalar(
        select(Assignment)
        .where(Assignment.run_id == run.id, Assignment.trainer_id == trainer.id)
        .order_by(Assignment.id.desc())
        .limit(1)
    )
    return last is not None and last.detach


def assign(session: Session, run: Run, trainer: Trainer, *, now: float) -> Assignment:
    """Give the run to the trainer, which must have nothing else."""
    last = session.scalar(select(func.max(Assignment.attempt)).where(Assignment.run_id == run.id)) or 0
    assignment = Assignment(run=run, trainer=trainer, attempt=last + 1, created_at=now, detach=False)
    session.add(assignment)
    session.flush()
    subscriptions.remember(session, run)
    run.stream_stats = None  # of the attempt before
    data = {"trainer": trainer.name, "attempt": assignment.attempt, "assignment": assignment.id}
    events.append(session, run.id, events.NewEvent("TRAINER_ASSIGNED", data=data), now=now)
    return assignment


def end_assignment(session: Session, assignment: Assignment, *, reason: str, now: float) -> None:
    """Close it; the trainer learns that from its next heartbeat."""
    assignment.ended_at = now
    assignment.end_reason = reason
    if assignment.run.stream_stats is not None:
        # The target is not asked about a run that nobody holds; the figures of its speed stay, as its last.
        assignment.run.stream_stats = assignment.run.stream_stats | {"packs_held_back": None}
    session.flush()
    data = {"trainer": assignment.trainer.name, "attempt": assignment.attempt, "reason": reason}
    events.append(session, assignment.run_id, events.NewEvent("TRAINER_ENDED", data=data), now=now)


def pardon(session: Session, run: Run) -> None:
    """Trainers that were detached from the run may be given it again."""
    session.execute(update(Assignment).where(Assignment.run_id == run.id, Assignment.detach).values(detach=False))
