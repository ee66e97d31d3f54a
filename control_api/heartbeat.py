"""What a heartbeat changes, and what it is answered. See docs/control-plane.md."""

from sqlalchemy.orm import Session

from control_api import lifecycle
from control_api.store import checkpoints, events, logs, metrics, runs, trainers
from control_api.store.tables import Assignment, Run, Trainer
from control_api.trainer_schemas import (
    Acknowledged,
    AssignedTarget,
    AssignmentReport,
    ChildExit,
    HeartbeatAnswer,
    HeartbeatReport,
    TrainerEvent,
)
from control_api.trainer_schemas import Assignment as AssignmentPublic
from slipstream.run_spec.states import DesiredState, RunEvent, RunState


def receive(
    session: Session, trainer: Trainer, heartbeat: HeartbeatReport, *, heartbeat_seconds: float, now: float
) -> HeartbeatAnswer:
    """Store what the trainer says and tell it what to do."""
    trainer.last_seen_at = now
    trainer.leaving = heartbeat.leaving
    acknowledged = _take(session, trainer, heartbeat.report, now) if heartbeat.report is not None else None
    assignment = trainers.open_assignment(session, trainer)
    return HeartbeatAnswer(
        assignment=describe(session, assignment) if assignment is not None else None,
        acknowledged=acknowledged,
        heartbeat_seconds=heartbeat_seconds,
    )


def describe(session: Session, assignment: Assignment) -> AssignmentPublic:
    """The assignment as its trainer reads it."""
    run = assignment.run
    return AssignmentPublic(
        id=assignment.id,
        run=run.name,
        run_uid=run.uid,
        attempt=assignment.attempt,
        desired_state=DesiredState.STOPPED if assignment.detach else DesiredState(run.desired_state),
        directory=run.directory,
        spec=run.spec | {"name": run.directory},
        target=AssignedTarget(name=run.target.name, address=run.target.address),
        next_metric_index=metrics.next_index(session, run.id, assignment.trainer.storage),
        next_log_line=assignment.next_log_line,
    )


def _take(session: Session, trainer: Trainer, report: AssignmentReport, now: float) -> Acknowledged | None:
    assignment = trainers.assignment_of(session, trainer, report.assignment)
    if assignment is None or report.run_uid not in (None, assignment.run.uid):
        return None
    run = assignment.run
    next_index = _keep_records(session, trainer, run, report, now)
    if report.logs is not None:
        logs.append(session, assignment, first_line=report.logs.first_line, lines=report.logs.lines)
    if assignment.ended_at is None:
        _observe(session, assignment, report, now)
    return Acknowledged(assignment=assignment.id, next_metric_index=next_index, next_log_line=assignment.next_log_line)


def _keep_records(session: Session, trainer: Trainer, run: Run, report: AssignmentReport, now: float) -> int:
    """What happened stays true when the assignment is over: it is kept in any case."""
    for one in report.events:
        events.append(session, run.id, _event(trainer, one), now=one.time.timestamp())
    if report.checkpoints is not None:
        checkpoints.replace(session, run, trainer.storage, report.checkpoints, now=now)
        if report.checkpoints and run.storage is None:
            run.storage = trainer.storage
    if report.metrics is None:
        return metrics.next_index(session, run.id, trainer.storage)
    batch = report.metrics
    return metrics.append(session, run.id, trainer.storage, first_index=batch.first_index, records=batch.records)


def _event(trainer: Trainer, reported: TrainerEvent) -> events.NewEvent:
    return events.NewEvent(reported.type, reported.message, reported.data, source=trainer.name, source_id=reported.id)


def _observe(session: Session, assignment: Assignment, report: AssignmentReport, now: float) -> None:
    run = assignment.run
    assignment.observed = report.state
    assignment.target_unreachable = report.target_unreachable
    run.transport = report.transport or run.transport
    if report.data is not None:
        run.data = report.data.model_dump(mode="json")
    if report.progress is not None:
        run.steps = report.progress.step
        run.total_steps = report.progress.total_steps or run.total_steps
    if report.state != "STARTING":
        assignment.restarting = False
    if report.exit is not None:
        _note_exit(session, assignment, report.exit, now)
    others = len(trainers.open_assignments(session, run)) - 1
    event = lifecycle.event_of_report(RunState(run.state), report.state, others=others)
    if event is not None:
        _move(session, run, event, report.exit, now)
    if lifecycle.ends_assignment(report.state):
        reason = "DETACHED" if assignment.detach else report.state
        trainers.end_assignment(session, assignment, reason=reason, now=now)


def _note_exit(session: Session, assignment: Assignment, ended: ChildExit, now: float) -> None:
    """Once for every child."""
    if assignment.last_exit is not None and assignment.last_exit["child"] >= ended.child:
        return
    assignment.last_exit = ended.model_dump(mode="json")
    assignment.restarting = ended.will_restart
    data = assignment.last_exit | {"attempt": assignment.attempt}
    event = events.NewEvent("CHILD_DIED", _in_words(ended), data, source=assignment.trainer.name)
    events.append(session, assignment.run_id, event, now=now)


def _move(session: Session, run: Run, event: RunEvent, ended: ChildExit | None, now: float) -> None:
    state = RunState(run.state)
    after = lifecycle.after_event(state, event)
    if after is state:
        return
    failed = ended if event is RunEvent.FATAL else None
    cause = runs.Cause(event, failed.reason, _in_words(failed)) if failed is not None else runs.Cause(event)
    runs.move(session, run, after, cause, now=now)


def _in_words(ended: ChildExit) -> str:
    message = ended.message.rstrip()
    ends = "" if not message or message[-1] in ".!?:" or not ended.remedy else "."
    return f"{message}{ends} {ended.remedy}".strip()
