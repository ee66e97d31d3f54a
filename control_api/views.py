"""From what is stored to what clients read."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from control_api import schemas, trainer_schemas
from control_api.bottleneck import bottleneck
from control_api.exporter import Export
from control_api.feed_cursor import Cursor
from control_api.store import checkpoints, events, metrics, runs, trainers
from control_api.store.tables import Checkpoint, Event, LogLine, Metric, Run, StateChange, Target, Trainer
from slipstream.run_spec.states import DesiredState, RunState, allowed_verbs

_RECORDS_OF_PACE = 20


def moment(seconds: float) -> datetime:
    """Seconds since the epoch as a time."""
    return datetime.fromtimestamp(seconds, UTC)


def target(row: Target) -> schemas.TargetPublic:
    """A target."""
    return schemas.TargetPublic.model_validate(
        {
            "name": row.name,
            "address": row.address,
            "status": row.status,
            "detail": row.detail,
            "model": row.model,
            "revision": row.revision,
            "fingerprint": row.fingerprint,
            "server_version": row.server_version,
            "checked_at": row.checked_at and moment(row.checked_at),
            "created_at": moment(row.created_at),
        }
    )


def trainer(row: Trainer, *, is_lost: bool) -> trainer_schemas.TrainerPublic:
    """A trainer, with the run it works on."""
    held = row.assignments[0] if row.assignments else None
    if trainers.has_left(row):
        status = "STOPPED"
    else:
        status = "LOST" if is_lost else "LEAVING" if row.leaving else "BUSY" if held else "FREE"
    return trainer_schemas.TrainerPublic.model_validate(
        {
            "name": row.name,
            "host": row.host,
            "storage": row.storage,
            "status": status,
            "run": held and held.run.name,
            "assignment": held and held.id,
            "devices": row.devices,
            "versions": row.versions,
            "protocol_version": row.protocol_version,
            "last_seen_at": moment(row.last_seen_at),
            "registered_at": moment(row.registered_at),
        }
    )


def run(session: Session, row: Run) -> schemas.RunPublic:
    """A run without its definition and history."""
    return schemas.RunPublic.model_validate(_run(session, row))


def run_detail(session: Session, row: Run) -> schemas.RunDetail:
    """A run, complete."""
    history = [_state_change(one) for one in runs.history(session, row)]
    return schemas.RunDetail.model_validate(_run(session, row) | {"spec": row.spec, "history": history})


def event(row: Event) -> schemas.EventPublic:
    """An event."""
    return schemas.EventPublic(
        id=row.id, time=moment(row.time), source=row.source, type=row.type, message=row.message, data=row.data
    )


def metric(row: Metric) -> schemas.MetricPublic:
    """A record of the metrics."""
    return schemas.MetricPublic(step=row.step, incarnation=row.incarnation, record=row.record)


def log_line(row: LogLine) -> schemas.LogLinePublic:
    """A line of a log."""
    return schemas.LogLinePublic(id=row.id, attempt=row.attempt, number=row.number, text=row.text)


def checkpoint(row: Checkpoint) -> schemas.CheckpointPublic:
    """A checkpoint."""
    return schemas.CheckpointPublic(
        step=row.step,
        incarnation=row.incarnation,
        path=row.path,
        storage=row.storage,
        saved_at=moment(row.saved_at),
        heldout=_heldout_of(row),
        is_best=row.is_best,
    )


def export(one: Export) -> schemas.ExportPublic:
    """An export."""
    return schemas.ExportPublic.model_validate(
        {
            "id": one.id,
            "run": one.request.run,
            "step": one.request.step,
            "format": one.request.format,
            "output": str(one.output),
            "state": one.state,
            "lines": list(one.lines),
            "requested_at": moment(one.requested_at),
            "ended_at": None if one.ended_at is None else moment(one.ended_at),
        }
    )


def _run(session: Session, row: Run) -> dict[str, Any]:
    records = [one.record for one in metrics.newest(session, row.id, _RECORDS_OF_PACE)]
    return {
        "name": row.name,
        "target": row.target.name,
        "state": row.state,
        "desired_state": DesiredState(row.desired_state),
        "allowed_verbs": allowed_verbs(RunState(row.state)),
        "reason": row.reason,
        "message": row.message,
        "note": row.note,
        "directory": row.directory,
        "progress": _progress(row, records),
        "throughput": _throughput(records, row.stream_stats or {}),
        "latest_metrics": records[0] if records else None,
        "heldout": _heldout(session, row),
        "data": row.data,
        "transport": row.transport,
        "packs_held_back": (row.stream_stats or {}).get("packs_held_back"),
        "conditions": [one | {"since": moment(one["since"])} for one in row.conditions],
        "trainers": [one.trainer.name for one in row.assignments],
        "latest_checkpoint_step": checkpoints.newest_step(session, row.id),
        "event_cursor": str(Cursor(events.newest_id(session, row.id), metrics.newest_id(session, row.id))),
        "created_at": moment(row.created_at),
        "updated_at": moment(row.updated_at),
    }


def _progress(row: Run, records: Sequence[dict[str, Any]]) -> schemas.Progress:
    total = row.total_steps or _steps_of_spec(row.spec)
    is_training = row.state in (RunState.RUNNING, RunState.PAUSING)
    return schemas.Progress(
        step=row.steps,
        max_steps=total,
        fraction=min(1.0, row.steps / total) if total else None,
        eta_seconds=metrics.measured(records[0], "eta_seconds") if is_training and records else None,
    )


def _heldout(session: Session, row: Run) -> schemas.Heldout | None:
    """Also of a run that has measured before its definition could say so."""
    best = checkpoints.best(session, row.id)
    if row.heldout is None and best is None and not (row.spec.get("eval") or {}).get("heldout"):
        return None
    return schemas.Heldout.model_validate({"latest": row.heldout, "best": best and _heldout_of(best)})


def _heldout_of(row: Checkpoint) -> schemas.HeldoutMeasure | None:
    return schemas.HeldoutMeasure.model_validate(row.heldout | {"step": row.step}) if row.heldout else None


def _steps_of_spec(spec: dict[str, Any]) -> int | None:
    """Steps of the whole run, where the definition alone says it: epochs also depend on the data."""
    train = spec["train"]
    if train["epochs"] is not None:
        return None
    limits = [train["max_steps"]] if train["max_steps"] else []
    if train["max_tokens"]:
        limits.append(train["max_tokens"] // (train["packs_per_step"] * spec["data"]["pack_tokens"]))
    return int(min(limits))


def _throughput(records: Sequence[dict[str, Any]], stream_stats: dict[str, Any]) -> schemas.Throughput | None:
    seconds = waited = tokens = 0.0
    for record in records:
        own = (
            metrics.measured(record, "seconds"),
            metrics.measured(record, "data_wait_seconds"),
            metrics.measured(record, "tokens_per_second"),
        )
        if own[0] is not None and own[1] is not None and own[2] is not None:
            seconds, waited, tokens = seconds + own[0], waited + own[1], tokens + own[2] * own[0]
    if seconds <= 0.0:
        return None
    data_wait_ratio = min(1.0, waited / seconds)
    return schemas.Throughput(
        trainer_tokens_per_second=tokens / seconds,
        target_tokens_per_second=stream_stats.get("target_tokens_per_second"),
        data_wait_ratio=data_wait_ratio,
        bottleneck=bottleneck(data_wait_ratio, stream_stats.get("target_wait_ratio")),
    )


def _state_change(row: StateChange) -> schemas.StateChange:
    return schemas.StateChange.model_validate(
        {
            "state": row.state,
            "cause": row.cause,
            "reason": row.reason,
            "message": row.message,
            "time": moment(row.time),
        }
    )
