"""Answers remembered by Idempotency-Key."""

from sqlalchemy import delete
from sqlalchemy.orm import Session

from control_api.store.tables import RememberedAnswer

KEPT_SECONDS = 24 * 3600.0


def find(session: Session, key: str, *, now: float) -> RememberedAnswer | None:
    """The answer, unless it is too old."""
    answer = session.get(RememberedAnswer, key)
    return answer if answer is not None and answer.created_at > now - KEPT_SECONDS else None


def remember(session: Session, answer: RememberedAnswer) -> None:
    """Keep it, in place of one that is too old."""
    session.merge(answer)


def forget_old(session: Session, *, now: float) -> None:
    """Drop what nobody may ask for any more."""
    session.execute(delete(RememberedAnswer).where(RememberedAnswer.created_at <= now - KEPT_SECONDS))
