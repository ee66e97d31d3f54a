"""Checkpoints of a run, as its trainer lists them."""

from collections.abc import Iterable, Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from control_api.store import events
from control_api.store.tables import Checkpoint, Run
from control_api.trainer_schemas import ReportedCheckpoint


def replace(session: Session, run: Run, storage: str, reported: Iterable[ReportedCheckpoint], *, now: float) -> None:
    """Make the list of `storage` what the trainer says; every new one is an event."""
    known = {
        one.step: one
        for one in session.scalars(select(Checkpoint).where(Checkpoint.run_id == run.id, Checkpoint.storage == storage))
    }
    listed = {one.step: one for one in reported}
    for step in known.keys() - listed.keys():
        session.delete(known[step])
    for step in sorted(listed):
        checkpoint = _store(session, run, storage, listed[step], known.get(step), now)
        checkpoint.heldout = listed[step].model_dump()["heldout"]
        checkpoint.is_best = listed[step].is_best
    session.flush()


def _store(
    session: Session, run: Run, storage: str, given: ReportedCheckpoint, known: Checkpoint | None, now: float
) -> Checkpoint:
    saved_at = given.saved_at.timestamp()
    if known is not None and (known.incarnation, known.saved_at, known.path) == (
        given.incarnation,
        saved_at,
        given.path,
    ):
        return known
    checkpoint = known or Checkpoint(run_id=run.id, storage=storage, step=given.step)
    checkpoint.incarnation, checkpoint.path, checkpoint.saved_at = given.incarnation, given.path, saved_at
    session.add(checkpoint)
    data = {"step": given.step, "incarnation": given.incarnation, "path": given.path}
    events.append(session, run.id, events.NewEvent("CHECKPOINT_SAVED", data=data), now=now)
    return checkpoint


def page(session: Session, run_id: int, *, after: int, size: int) -> Sequence[Checkpoint]:
    """In the order in which they were reported."""
    query = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.id > after)
    return session.scalars(query.order_by(Checkpoint.id).limit(size)).all()


def every(session: Session, run_id: int) -> Sequence[Checkpoint]:
    """Of all storages, the one that was saved last comes last."""
    return session.scalars(select(Checkpoint).where(Checkpoint.run_id == run_id).order_by(Checkpoint.saved_at)).all()


def of_step(session: Session, run_id: int, step: int) -> Checkpoint | None:
    """The one that was saved last, where several storages hold one of this step."""
    query = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.step == step)
    return session.scalars(query.order_by(Checkpoint.saved_at.desc()).limit(1)).first()


def best(session: Session, run_id: int) -> Checkpoint | None:
    """The one that measured best; the one that was saved last, where several storages have one."""
    query = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.is_best)
    return session.scalars(query.order_by(Checkpoint.saved_at.desc()).limit(1)).first()


def newest_step(session: Session, run_id: int) -> int | None:
    """Steps trained by the newest one; None when there is none."""
    return session.scalar(select(func.max(Checkpoint.step)).where(Checkpoint.run_id == run_id))
