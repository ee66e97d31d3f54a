"""Tables. Times are seconds since the epoch; JSON is stored as text; ids that a client could see again never repeat."""

from typing import Any

from sqlalchemy import JSON, Boolean, Float, ForeignKey, Index, String, Text, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

SCHEMA_VERSION = 8
"""Of everything below; raise it with every change, together with a migration (store/migrations.py)."""

_NEVER_REUSED = {"sqlite_autoincrement": True}


class Table(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map = {dict[str, Any]: JSON, list[Any]: JSON, str: Text, float: Float, bool: Boolean}  # noqa: RUF012


class Target(Table):
    """A registered target server."""

    __tablename__ = "targets"
    __table_args__ = (_NEVER_REUSED,)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String, unique=True)
    address: Mapped[str]
    created_at: Mapped[float]
    status: Mapped[str] = mapped_column(default="UNKNOWN")
    detail: Mapped[str] = mapped_column(default="not asked yet")
    model: Mapped[str | None]
    revision: Mapped[str | None]
    fingerprint: Mapped[str | None]
    server_version: Mapped[str | None]
    sizes: Mapped[dict[str, Any] | None]
    """Of its model, as it said itself; the fields of slipstream.plan.sizes.TargetSizes."""
    checked_at: Mapped[float | None]


class Run(Table):
    """A run, its definition and where it stands."""

    __tablename__ = "runs"
    __table_args__ = (_NEVER_REUSED,)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String, unique=True)
    directory: Mapped[str] = mapped_column(String, unique=True)
    uid: Mapped[str | None]
    """Unlike names and numbers it is no other run's, not even in another database; None for a run of schema 4."""
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id"))
    spec: Mapped[dict[str, Any]]
    note: Mapped[str] = mapped_column(default="")
    state: Mapped[str] = mapped_column(String, index=True)
    desired_state: Mapped[str]
    reason: Mapped[str | None]
    message: Mapped[str] = mapped_column(default="")
    conditions: Mapped[list[Any]] = mapped_column(default=list)
    ended_early: Mapped[bool] = mapped_column(default=False)
    """The trainer was lost while the run was pausing or stopping."""
    storage: Mapped[str | None]
    """Where the checkpoints are; None before the first one."""
    steps: Mapped[int] = mapped_column(default=0)
    total_steps: Mapped[int | None]
    stream_stats: Mapped[dict[str, Any] | None]
    """What its target said of its stream last; the fields of target_visit.StreamStats."""
    heldout: Mapped[dict[str, Any] | None]
    """The newest measurement on held-out answers; the fields of schemas.HeldoutMeasure."""
    data: Mapped[dict[str, Any] | None]
    """What was found in its data; the fields of data_account.DataAccount."""
    transport: Mapped[str | None]
    """What its newest training process chose."""
    created_at: Mapped[float]
    updated_at: Mapped[float]

    target: Mapped[Target] = relationship(lazy="joined", innerjoin=True)
    assignments: Mapped[list["Assignment"]] = relationship(
        primaryjoin="and_(Run.id == Assignment.run_id, Assignment.ended_at.is_(None))",
        viewonly=True,
        order_by="Assignment.id",
    )
    """The open ones."""


class Subscription(Table):
    """The place of a run at a target server. It outlives the run until the target has closed it."""

    __tablename__ = "subscriptions"
    __table_args__ = (UniqueConstraint("target_id", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    target_id: Mapped[int] = mapped_column(ForeignKey("targets.id", ondelete="CASCADE"))
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id", ondelete="SET NULL"), index=True)
    """None: the run was deleted, and the subscription is to be closed."""
    name: Mapped[str] = mapped_column(String)


class UsedDirectory(Table):
    """Names that must never be used again for a directory: files of a deleted run may still be there."""

    __tablename__ = "used_directories"

    directory: Mapped[str] = mapped_column(String, primary_key=True)


class StateChange(Table):
    """One line of a run's history."""

    __tablename__ = "state_changes"
    __table_args__ = (_NEVER_REUSED,)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    state: Mapped[str]
    cause: Mapped[str]
    reason: Mapped[str | None]
    message: Mapped[str] = mapped_column(default="")
    time: Mapped[float]


class Trainer(Table):
    """A trainer agent."""

    __tablename__ = "trainers"
    __table_args__ = (_NEVER_REUSED,)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String, unique=True)
    instance_id: Mapped[str]
    protocol_version: Mapped[int]
    host: Mapped[str]
    storage: Mapped[str]
    devices: Mapped[list[Any]]
    versions: Mapped[dict[str, Any]]
    leaving: Mapped[bool] = mapped_column(default=False)
    forgotten: Mapped[bool] = mapped_column(default=False, server_default=text("0"))
    """Deleted: the row stays for the attempts that name it, and comes back when the trainer does."""
    registered_at: Mapped[float]
    last_seen_at: Mapped[float]

    assignments: Mapped[list["Assignment"]] = relationship(
        primaryjoin="and_(Trainer.id == Assignment.trainer_id, Assignment.ended_at.is_(None))",
        viewonly=True,
    )
    """The open one, if any."""


class Assignment(Table):
    """A trainer's work on a run, from when it is given to when it is over: one attempt."""

    __tablename__ = "assignments"
    __table_args__ = (
        # One open assignment a trainer.
        Index("open_assignment", "trainer_id", unique=True, sqlite_where=text("ended_at IS NULL")),
        _NEVER_REUSED,
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    trainer_id: Mapped[int] = mapped_column(ForeignKey("trainers.id"), index=True)
    attempt: Mapped[int]
    created_at: Mapped[float]
    detach: Mapped[bool] = mapped_column(default=False)
    """The trainer is asked to leave the run; the run goes on with another."""
    observed: Mapped[str | None]
    target_unreachable: Mapped[bool] = mapped_column(default=False)
    last_exit: Mapped[dict[str, Any] | None]
    restarting: Mapped[bool] = mapped_column(default=False)
    """A child died, and the next one has not trained a step yet."""
    next_log_line: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    """The first line of the attempt's log file that is not stored."""
    ended_at: Mapped[float | None]
    end_reason: Mapped[str | None]

    run: Mapped[Run] = relationship()
    trainer: Mapped[Trainer] = relationship()


class Checkpoint(Table):
    """A complete checkpoint on a trainer's disk."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("run_id", "storage", "step"), _NEVER_REUSED)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    storage: Mapped[str]
    step: Mapped[int]
    incarnation: Mapped[int]
    path: Mapped[str]
    saved_at: Mapped[float]
    heldout: Mapped[dict[str, Any] | None]
    """The fields of trainer_schemas.ReportedHeldout."""
    is_best: Mapped[bool] = mapped_column(default=False, server_default=text("0"))


class Metric(Table):
    """One line of a metrics.jsonl."""

    __tablename__ = "metrics"
    __table_args__ = (
        UniqueConstraint("run_id", "incarnation", "step"),
        Index("metric_arrival", "run_id", "id"),
        _NEVER_REUSED,
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    incarnation: Mapped[int]
    step: Mapped[int]
    record: Mapped[dict[str, Any]]


class MetricPosition(Table):
    """How many lines of the metrics.jsonl of a run, on one storage, are stored."""

    __tablename__ = "metric_positions"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    storage: Mapped[str] = mapped_column(String, primary_key=True)
    next_index: Mapped[int]


class LogLine(Table):
    """One line of the log of an attempt."""

    __tablename__ = "log_lines"
    __table_args__ = (Index("log_order", "run_id", "id"), _NEVER_REUSED)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    number: Mapped[int]
    text: Mapped[str]


class Event(Table):
    """Something that happened to a run."""

    __tablename__ = "events"
    __table_args__ = (
        UniqueConstraint("run_id", "source", "source_id"),
        Index("event_order", "run_id", "id"),
        _NEVER_REUSED,
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    source: Mapped[str]
    source_id: Mapped[str | None]
    """A trainer's own id of the event; None for the control plane's."""
    type: Mapped[str]
    message: Mapped[str]
    data: Mapped[dict[str, Any]]
    time: Mapped[float]


class RememberedAnswer(Table):
    """The answer to a request with an Idempotency-Key."""

    __tablename__ = "remembered_answers"

    key: Mapped[str] = mapped_column(String, primary_key=True)
    request_hash: Mapped[str]
    status: Mapped[int]
    body: Mapped[str]
    created_at: Mapped[float]
