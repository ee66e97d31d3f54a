"""What training processes wrote, line by line: the newest of every run."""

from collections.abc import Sequence

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from control_api.store.database import touch
from control_api.store.tables import Assignment, LogLine

KEPT_LINES = 10_000
"""Of a run; the files on the trainer's disk have all."""


def append(session: Session, assignment: Assignment, *, first_line: int, lines: Sequence[str]) -> None:
    """Store the lines that are not here yet; a gap before them is accepted, and stays.

    Old lines of the run beyond KEPT_LINES are dropped.
    """
    known, end = assignment.next_log_line, first_line + len(lines)
    if not lines or end <= known:
        return
    run_id, start = assignment.run_id, max(first_line, known)
    fresh = enumerate(lines[start - first_line :], start=start)
    rows = [{"run_id": run_id, "attempt": assignment.attempt, "number": number, "text": text} for number, text in fresh]
    session.execute(insert(LogLine), rows)
    assignment.next_log_line = end
    oldest = before_newest(session, run_id, KEPT_LINES)
    session.execute(delete(LogLine).where(LogLine.run_id == run_id, LogLine.id <= oldest))
    touch(session, run_id)


def page(session: Session, run_id: int, *, after: int, size: int) -> Sequence[LogLine]:
    """In the order of arrival."""
    query = select(LogLine).where(LogLine.run_id == run_id, LogLine.id > after).order_by(LogLine.id).limit(size)
    return session.scalars(query).all()


def before_newest(session: Session, run_id: int, size: int) -> int:
    """The id after which the newest `size` lines come; 0 when there are no more than that."""
    query = select(LogLine.id).where(LogLine.run_id == run_id).order_by(LogLine.id.desc()).offset(size).limit(1)
    return session.scalar(query) or 0
