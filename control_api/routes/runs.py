"""/v1/runs: created, read, changed, deleted, and moved by verbs."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from sqlalchemy.orm import Session

from control_api import lifecycle, views
from control_api.dependencies import OnceDep, PageDep, ServicesDep, require_run, require_target
from control_api.first_drafter import settle_first_drafter
from control_api.model_match import require_same_model
from control_api.reconciler import set_conditions
from control_api.routes.responses import refusals
from control_api.run_definition import define_run, require_trainable, run_sizes, served_sizes
from control_api.schemas import RunCreate, RunDetail, RunList, RunUpdate
from control_api.store import runs, targets, trainers
from control_api.store.database import touch
from control_api.store.tables import Target
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.states import AT_REST, Condition, RunState, Verb

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post(
    "",
    operation_id="create_run",
    status_code=201,
    response_model=RunDetail,
    responses=refusals(404, 409),
)
def create_run(body: RunCreate, services: ServicesDep, once: OnceDep) -> Response:
    """Create a run. It waits in PENDING for a trainer that can take it."""
    if (known := once.answered_before()) is not None:
        return known
    spec = define_run(body, services.settings.data_roots)
    with services.database.read() as session:
        present = services.reconciler.present(session, services.clock())
        served = served_sizes(targets.meant(session, body.target))
    spec, first = settle_first_drafter(spec, services.database, present)
    sizes = run_sizes(spec, served, services.settings.data_roots, with_answers=True)
    require_trainable(spec, sizes, present)

    def create(session: Session) -> RunDetail:
        target = require_target(session, body.target) if body.target is not None else _only_target(session)
        if (namesake := runs.find(session, spec.name)) is not None:
            raise lifecycle.name_taken(spec.name, RunState(namesake.state))
        definition = spec.model_dump(mode="json")
        require_same_model(definition, target)
        now = services.clock()
        row = runs.create(session, spec=definition, target=target, note=body.note, now=now)
        if first is not None:
            first.note(session, row, now=now)
        services.reconciler.needs.remember(row, spec, served, sizes)
        # Said at once, to whoever creates it: it would wait for nothing.
        if (unfit := services.reconciler.misfit(session, row, now)) is not None:
            set_conditions(session, row, {Condition.NO_TRAINER_FITS: unfit}, now=now)
        return views.run_detail(session, row)

    return once(create, status=201)


@router.get("", operation_id="list_runs", responses=refusals(has_body=False))
def list_runs(services: ServicesDep, page: PageDep, state: Annotated[RunState | None, Query()] = None) -> RunList:
    """In the order of creation."""
    with services.database.read() as session:
        rows = runs.page(session, after=page.after, size=page.size, state=state)
        token = page.token_after([one.id for one in rows])
        return RunList(runs=[views.run(session, one) for one in rows], next_page_token=token)


@router.get("/{run}", operation_id="get_run", responses=refusals(404, has_body=False))
def get_run(run: str, services: ServicesDep) -> RunDetail:
    """One run with its definition and history."""
    with services.database.read() as session:
        return views.run_detail(session, require_run(session, run))


@router.patch("/{run}", operation_id="update_run", response_model=RunDetail, responses=refusals(404, 409))
def update_run(run: str, body: RunUpdate, services: ServicesDep, once: OnceDep) -> Response:
    """Change the note, or the target of a run that no trainer works on."""

    def update(session: Session) -> RunDetail:
        row = require_run(session, run)
        if body.target is not None:
            state = RunState(row.state)
            if state not in AT_REST and state is not RunState.PENDING:
                raise lifecycle.TransitionIllegalError(
                    f"Run {run!r} is {state}; its target can change only in PENDING, STOPPED, FAILED and SUCCEEDED.",
                    state,
                )
            target = require_target(session, body.target)
            require_same_model(row.spec, target)
            row.target = target
        if body.note is not None:
            row.note = body.note
        row.updated_at = services.clock()
        touch(session, row.id)
        session.flush()
        return views.run_detail(session, row)

    return once(update)


@router.delete("/{run}", operation_id="delete_run", status_code=204, responses=refusals(404, 409))
def delete_run(run: str, services: ServicesDep, once: OnceDep) -> Response:
    """Forget a run that is at rest. Its files stay on the trainer's disk; the target closes its subscription."""

    def delete(session: Session) -> None:
        row = require_run(session, run)
        state = RunState(row.state)
        if state not in AT_REST:
            raise lifecycle.TransitionIllegalError(
                f"Run {run!r} is {state}; it can be deleted in STOPPED, FAILED and SUCCEEDED.", state
            )
        runs.delete(session, row)

    answer = once(delete, status=204)
    services.prober.wake()  # it tells the target
    return answer


@router.post("/{run}:pause", operation_id="pause_run", response_model=RunDetail, responses=refusals(404, 409))
def pause_run(run: str, services: ServicesDep, once: OnceDep) -> Response:
    """Save and hold; the trainer stays with the run."""
    return _verb(run, Verb.PAUSE, services, once)


@router.post("/{run}:resume", operation_id="resume_run", response_model=RunDetail, responses=refusals(404, 409))
def resume_run(run: str, services: ServicesDep, once: OnceDep) -> Response:
    """Go on, from the last checkpoint where nothing runs any more."""
    return _verb(run, Verb.RESUME, services, once)


@router.post("/{run}:stop", operation_id="stop_run", response_model=RunDetail, responses=refusals(404, 409))
def stop_run(run: str, services: ServicesDep, once: OnceDep) -> Response:
    """Save and give the trainer back; the run can be resumed later."""
    return _verb(run, Verb.STOP, services, once)


def _only_target(session: Session) -> Target:
    """The target that need not be named.

    Raises:
        SlipstreamError: TARGET_UNKNOWN, none is registered; REQUEST_INVALID, several are.
    """
    found = targets.every(session)
    if not found:
        raise SlipstreamError(
            "No target is registered.",
            reason=Reason.TARGET_UNKNOWN,
            remedy='Start a target server and register it: POST /v1/targets {"name": …, "address": "HOST:PORT"}.',
        )
    if len(found) > 1:
        raise SlipstreamError(
            "Several targets are registered.",
            reason=Reason.REQUEST_INVALID,
            remedy=f"Give `target`, one of: {', '.join(one.name for one in found)}.",
        )
    return found[0]


def _verb(name: str, verb: Verb, services: ServicesDep, once: OnceDep) -> Response:
    def apply(session: Session) -> RunDetail:
        row = require_run(session, name)
        before = RunState(row.state)
        after = lifecycle.after_verb(name, before, verb)
        if after is not before:
            runs.move(session, row, after, runs.Cause(verb), now=services.clock())
            if verb is Verb.RESUME:
                row.ended_early = False
                trainers.pardon(session, row)
            session.flush()
        return views.run_detail(session, row)

    return once(apply)
