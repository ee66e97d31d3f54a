"""/v1/targets: target servers, registered by address."""

from fastapi import APIRouter, Response
from sqlalchemy.orm import Session

from control_api import views
from control_api.dependencies import Once, OnceDep, PageDep, Services, ServicesDep, require_run, require_target
from control_api.lifecycle import TransitionIllegalError
from control_api.routes.responses import refusals
from control_api.schemas import PacksOf, RunPublic, TargetCreate, TargetList, TargetPublic
from control_api.store import subscriptions, targets
from control_api.store.database import touch
from control_api.target_orders import TargetOrders
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.states import RunState
from slipstream.wire.channel import TargetClient

router = APIRouter(prefix="/v1/targets", tags=["targets"])


@router.post(
    "",
    operation_id="create_target",
    status_code=201,
    response_model=TargetPublic,
    responses=refusals(409),
)
def create_target(body: TargetCreate, services: ServicesDep, once: OnceDep) -> Response:
    """Register a target server. It need not be up: its status says when it is."""
    TargetClient(body.address).close()  # refuses what is no address; nothing is sent

    def create(session: Session) -> TargetPublic:
        if targets.find(session, body.name) is not None:
            raise SlipstreamError(
                f"There is a target {body.name!r} already.",
                reason=Reason.NAME_TAKEN,
                remedy="Choose another name, or delete that target first.",
            )
        return views.target(targets.add(session, name=body.name, address=body.address, now=services.clock()))

    answer = once(create, status=201)
    services.prober.wake()
    return answer


@router.get("", operation_id="list_targets", responses=refusals(has_body=False))
def list_targets(services: ServicesDep, page: PageDep) -> TargetList:
    """In the order of registration."""
    with services.database.read() as session:
        rows = targets.page(session, after=page.after, size=page.size)
        token = page.token_after([one.id for one in rows])
        return TargetList(targets=[views.target(one) for one in rows], next_page_token=token)


@router.get("/{target}", operation_id="get_target", responses=refusals(404, has_body=False))
def get_target(target: str, services: ServicesDep) -> TargetPublic:
    """One target."""
    with services.database.read() as session:
        return views.target(require_target(session, target))


@router.delete("/{target}", operation_id="delete_target", status_code=204, responses=refusals(404, 409))
def delete_target(target: str, once: OnceDep) -> Response:
    """Forget a target that no run names."""

    def delete(session: Session) -> None:
        row = require_target(session, target)
        if users := targets.runs_of(session, row):
            raise SlipstreamError(
                f"Target {target!r} is named by {', '.join(users[:3])}{' and others' if len(users) > 3 else ''}.",
                reason=Reason.TARGET_IN_USE,
                remedy="Delete these runs, or give them another target.",
            )
        session.delete(row)

    return once(delete, status=204)


@router.post("/{target}:probe", operation_id="probe_target", responses=refusals(404))
def probe_target(target: str, services: ServicesDep) -> TargetPublic:
    """Ask the target server now."""
    with services.database.read() as session:
        address = require_target(session, target).address
    services.prober.probe(target, address)
    with services.database.read() as session:
        return views.target(require_target(session, target))


@router.post("/{target}:drain", operation_id="drain_target", response_model=TargetPublic, responses=refusals(404, 409))
def drain_target(target: str, services: ServicesDep, once: OnceDep) -> Response:
    """Let the server finish what is leased and compute nothing more; trainers wait until it is started again."""
    if (before := once.answered_before()) is not None:
        return before
    with services.database.read() as session:
        address = require_target(session, target).address
    _orders(address, services).drain()
    services.prober.probe(target, address)
    return once(lambda session: views.target(require_target(session, target)))


@router.post("/{target}:pause", operation_id="pause_packs", response_model=RunPublic, responses=refusals(404, 409))
def pause_packs(target: str, body: PacksOf, services: ServicesDep, once: OnceDep) -> Response:
    """Give a run no packs: its trainer stays and waits, the other runs have the target's time."""
    return _hold(target, body.run, services, once, hold_back=True)


@router.post("/{target}:resume", operation_id="resume_packs", response_model=RunPublic, responses=refusals(404, 409))
def resume_packs(target: str, body: PacksOf, services: ServicesDep, once: OnceDep) -> Response:
    """Give a run packs again."""
    return _hold(target, body.run, services, once, hold_back=False)


def _orders(address: str, services: Services) -> TargetOrders:
    return TargetOrders(address, token=services.settings.token, deadline=services.settings.probe_deadline)


def _hold(target: str, run: str, services: Services, once: Once, *, hold_back: bool) -> Response:
    if (before := once.answered_before()) is not None:
        return before
    with services.database.read() as session:
        address, row = require_target(session, target).address, require_run(session, run)
        if row.target.name != target:
            raise SlipstreamError(
                f"Run {run!r} is on target {row.target.name!r}.",
                reason=Reason.REQUEST_INVALID,
                remedy="Name that target.",
            )
        if row.state == RunState.SUCCEEDED:
            raise TransitionIllegalError(f"Run {run!r} has SUCCEEDED; it reads no packs any more.", RunState.SUCCEEDED)
        subscription = subscriptions.name_of(row)
    orders = _orders(address, services)
    (orders.hold_back if hold_back else orders.give_again)(subscription)

    def note(session: Session) -> RunPublic:
        # As of now; from then on it is what the target says when it is asked.
        row = require_run(session, run)
        row.stream_stats = (row.stream_stats or {}) | {"packs_held_back": hold_back}
        touch(session, row.id)
        session.flush()
        return views.run(session, row)

    answer = once(note)
    services.reconciler.wake()
    return answer
