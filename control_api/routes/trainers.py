"""/v1/trainers: agents register themselves, send heartbeats, are given runs and taken off them."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Response
from sqlalchemy.orm import Session

from control_api import heartbeat, views
from control_api.dependencies import OnceDep, PageDep, Services, ServicesDep, require_run, require_trainer
from control_api.lifecycle import TRAINERS_PER_RUN, TransitionIllegalError
from control_api.model_match import require_same_model
from control_api.placement import obstacle
from control_api.routes.responses import refusals
from control_api.store import runs, trainers
from control_api.store.database import touch
from control_api.store.tables import Run, Trainer
from control_api.trainer_schemas import (
    TRAINER_PROTOCOL_VERSION,
    HeartbeatAnswer,
    HeartbeatReport,
    TrainerAttach,
    TrainerList,
    TrainerPublic,
    TrainerRegister,
)
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.states import ATTACHABLE, RunEvent, RunState

router = APIRouter(prefix="/v1/trainers", tags=["trainers"])


@router.post(
    "",
    operation_id="register_trainer",
    status_code=201,
    response_model=TrainerPublic,
    responses=refusals(409),
)
def register_trainer(body: TrainerRegister, services: ServicesDep, once: OnceDep) -> Response:
    """Register an agent, or the same one again after its restart."""
    if body.protocol_version != TRAINER_PROTOCOL_VERSION:
        raise SlipstreamError(
            f"Trainer {body.name!r} speaks protocol {body.protocol_version}, this server speaks "
            f"{TRAINER_PROTOCOL_VERSION}.",
            reason=Reason.PROTOCOL_MISMATCH,
            remedy="Install the same version of Slipstream on both sides.",
        )
    answer = once(lambda session: _register(session, body, services), status=201)
    services.reconciler.wake()
    return answer


@router.get("", operation_id="list_trainers", responses=refusals(has_body=False))
def list_trainers(services: ServicesDep, page: PageDep) -> TrainerList:
    """In the order of their first registration."""
    with services.database.read() as session:
        rows = trainers.page(session, after=page.after, size=page.size)
        token = page.token_after([one.id for one in rows])
        return TrainerList(trainers=[_view(one, services) for one in rows], next_page_token=token)


@router.get("/{trainer}", operation_id="get_trainer", responses=refusals(404, has_body=False))
def get_trainer(trainer: str, services: ServicesDep) -> TrainerPublic:
    """One trainer."""
    with services.database.read() as session:
        return _view(require_trainer(session, trainer), services)


@router.delete("/{trainer}", operation_id="delete_trainer", status_code=204, responses=refusals(404, 409))
def delete_trainer(trainer: str, services: ServicesDep, once: OnceDep) -> Response:
    """Forget a trainer that is STOPPED or LOST and has no run. One that comes back registers itself anew."""

    def delete(session: Session) -> None:
        row = require_trainer(session, trainer)
        held = trainers.open_assignment(session, row)
        if held is not None:
            raise SlipstreamError(
                f"Trainer {trainer!r} holds run {held.run.name!r}.",
                reason=Reason.TRAINER_BUSY,
                remedy="Detach it, or stop the run.",
            )
        if not _is_gone(row, services):
            raise SlipstreamError(
                f"Trainer {trainer!r} is heard of; only one that is STOPPED or LOST can be forgotten.",
                reason=Reason.TRAINER_BUSY,
                remedy="Stop its process: SIGTERM, Ctrl-C, or `slipstream trainer stop` where it belongs to a local "
                "stack.",
            )
        trainers.forget(row)

    return once(delete, status=204)


@router.post("/{trainer}:heartbeat", operation_id="heartbeat_trainer", responses=refusals(404, 409))
def heartbeat_trainer(trainer: str, body: HeartbeatReport, services: ServicesDep) -> HeartbeatAnswer:
    """The agent says what it does and reads what it should do."""
    with services.database.write() as session:
        row = require_trainer(session, trainer)
        if row.instance_id != body.instance_id:
            raise _name_taken(row)
        return heartbeat.receive(
            session, row, body, heartbeat_seconds=services.settings.heartbeat_seconds, now=services.clock()
        )


@router.post(
    "/{trainer}:attach",
    operation_id="attach_trainer",
    response_model=TrainerPublic,
    responses=refusals(404, 409),
)
def attach_trainer(trainer: str, body: TrainerAttach, services: ServicesDep, once: OnceDep) -> Response:
    """Give a free trainer a run that no other trainer works on."""

    def attach(session: Session) -> TrainerPublic:
        row = require_trainer(session, trainer)
        run = require_run(session, body.run)
        _attach(session, row, run, services)
        return _view(row, services)

    return once(attach)


@router.post(
    "/{trainer}:detach", operation_id="detach_trainer", response_model=TrainerPublic, responses=refusals(404, 409)
)
def detach_trainer(trainer: str, services: ServicesDep, once: OnceDep) -> Response:
    """Ask a trainer to save and leave its run, which waits for another; it is not given back by itself."""

    def detach(session: Session) -> TrainerPublic:
        row = require_trainer(session, trainer)
        held = trainers.open_assignment(session, row)
        if held is None:
            raise SlipstreamError(
                f"Trainer {trainer!r} works on nothing.", reason=Reason.TRAINER_IDLE, remedy="There is nothing to do."
            )
        held.detach = True
        touch(session, held.run_id)
        session.flush()
        return _view(row, services)

    return once(detach)


def _is_gone(row: Trainer, services: Services) -> bool:
    """Whether nobody has its name any more."""
    return trainers.has_left(row) or services.reconciler.is_lost(row, services.clock())


def _view(row: Trainer, services: Services) -> TrainerPublic:
    return views.trainer(row, is_lost=services.reconciler.is_lost(row, services.clock()))


def _name_taken(row: Trainer) -> SlipstreamError:
    return SlipstreamError(
        f"The name {row.name!r} belongs to another trainer, on host {row.host!r}.",
        reason=Reason.NAME_TAKEN,
        remedy="Give every trainer a name of its own; the name of one that is gone is free after a while.",
    )


def _register(session: Session, body: TrainerRegister, services: Services) -> TrainerPublic:
    now = services.clock()
    row = trainers.find(session, body.name)
    if row is not None and row.instance_id != body.instance_id and not _is_gone(row, services):
        raise _name_taken(row)
    if row is None:
        row = trainers.find_or_new(session, body.name, now=now)
    storage, room = row.storage, _room(row.devices)
    row.instance_id, row.protocol_version = body.instance_id, body.protocol_version
    row.host, row.storage = body.host, body.storage
    row.devices, row.versions = [one.model_dump() for one in body.devices], dict(body.versions)
    row.leaving, row.last_seen_at = False, now
    session.flush()
    if (held := trainers.open_assignment(session, row)) is not None:
        unfit = room != _room(row.devices) and obstacle(held.run, services.reconciler.needs.of(held.run), row)
        # What it worked on lies on another storage, or it is another machine that cannot hold it.
        if storage != row.storage or unfit:
            trainers.end_assignment(session, held, reason="REPLACED", now=now)
    session.expire(row, ["assignments"])
    return _view(row, services)


def _room(devices: Sequence[Mapping[str, Any]] | None) -> list[tuple[Any, ...]]:
    """What tells another machine by; not what only newer agents say, whose runs train already."""
    return [(one["kind"], one.get("name"), one.get("memory_bytes")) for one in devices or ()]


def _attach(session: Session, trainer: Trainer, run: Run, services: Services) -> None:
    now, state = services.clock(), RunState(run.state)
    if trainers.has_left(trainer):
        raise SlipstreamError(
            f"Trainer {trainer.name!r} was stopped.",
            reason=Reason.TRAINER_LOST,
            remedy="Start it again, then attach it.",
        )
    if trainers.open_assignment(session, trainer) is not None or trainer.leaving:
        raise SlipstreamError(
            f"Trainer {trainer.name!r} has a run, or is about to leave.",
            reason=Reason.TRAINER_BUSY,
            remedy="Detach it first, or choose a free one.",
        )
    if services.reconciler.is_lost(trainer, now):
        raise SlipstreamError(
            f"Nothing is heard of trainer {trainer.name!r}.",
            reason=Reason.TRAINER_LOST,
            remedy="Start it again, then attach it.",
        )
    if state not in ATTACHABLE:
        raise TransitionIllegalError(
            f"Run {run.name!r} is {state}; a trainer is attached in {', '.join(sorted(ATTACHABLE))}.", state
        )
    held = trainers.open_assignments(session, run)
    alive = [one.trainer.name for one in held if not services.reconciler.is_lost(one.trainer, now)]
    if len(alive) >= TRAINERS_PER_RUN:
        raise SlipstreamError(
            f"Run {run.name!r} has a trainer: {', '.join(alive)}.",
            reason=Reason.RUN_HAS_TRAINER,
            remedy="Detach that one first.",
        )
    require_same_model(run.spec, run.target)
    if (unfit := obstacle(run, services.reconciler.needs.of(run), trainer)) is not None:
        raise SlipstreamError(unfit, reason=Reason.TRAINER_UNSUITABLE, remedy="Choose another trainer.")
    for assignment in held:
        trainers.end_assignment(session, assignment, reason="REPLACED", now=now)
    trainers.assign(session, run, trainer, now=now)
    if state is RunState.PENDING:
        runs.move(session, run, RunState.STARTING, runs.Cause(RunEvent.ASSIGNED, message=trainer.name), now=now)
    session.flush()
    session.expire(trainer, ["assignments"])
