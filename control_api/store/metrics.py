"""Metrics of a run: lines of metrics.jsonl, stored once, in the order in which they were written."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from control_api.store.database import touch
from control_api.store.tables import Metric, MetricPosition, Run

_LARGEST_MEASURE = 1e15


def next_index(session: Session, run_id: int, storage: str) -> int:
    """The first line of the file on `storage` that is not stored."""
    position = session.get(MetricPosition, (run_id, storage))
    return position.next_index if position is not None else 0


def append(session: Session, run_id: int, storage: str, *, first_index: int, records: Sequence[dict[str, Any]]) -> int:
    """Store what continues the lines that are here; returns the next index.

    Lines that are here already are skipped, and nothing is taken after a gap.
    """
    known = next_index(session, run_id, storage)
    if first_index > known or first_index + len(records) <= known:
        return known
    fresh = records[known - first_index :]
    rows = [{"run_id": run_id, "incarnation": one["incarnation"], "step": one["step"], "record": one} for one in fresh]
    # The unique key guards what line numbers cannot: a file that began anew on another storage.
    session.execute(insert(Metric).on_conflict_do_nothing(), rows)
    measured = next((one for one in map(_heldout, reversed(fresh)) if one is not None), None)
    if measured is not None:
        session.execute(update(Run).where(Run.id == run_id).values(heldout=measured))
    reached = known + len(fresh)
    session.merge(MetricPosition(run_id=run_id, storage=storage, next_index=reached))
    touch(session, run_id)
    return reached


def _heldout(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the record measured on held-out answers; the rest of it is the trainer's to define."""
    length, sources = measured(record, "heldout_accepted_length"), record.get("heldout_sources")
    if length is None:
        return None
    found = sources.items() if isinstance(sources, dict) else ()
    lengths = {name: measured(one, "accepted_length") for name, one in found if isinstance(one, dict)}
    by_source = {name: one for name, one in lengths.items() if one is not None}
    return {"step": record["step"] + 1, "accepted_length": length, "by_source": by_source}


def measured(record: Mapping[str, Any], key: str) -> float | None:
    """A number from a trainer's record; None where there is none that makes sense."""
    value = record.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _LARGEST_MEASURE:
        return None
    return float(value)


def page(session: Session, run_id: int, *, after: int, size: int) -> Sequence[Metric]:
    """In the order of arrival."""
    query = select(Metric).where(Metric.run_id == run_id, Metric.id > after).order_by(Metric.id).limit(size)
    return session.scalars(query).all()


def newest(session: Session, run_id: int, size: int) -> Sequence[Metric]:
    """The last `size`, newest first."""
    return session.scalars(select(Metric).where(Metric.run_id == run_id).order_by(Metric.id.desc()).limit(size)).all()


def newest_id(session: Session, run_id: int) -> int:
    """0 when there is none."""
    return session.scalar(select(func.max(Metric.id)).where(Metric.run_id == run_id)) or 0
