"""/v1/runs/{run}/…: what a run leaves behind, as lists and as one stream."""

from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from control_api import views
from control_api.dependencies import PageDep, ServicesDep, require_run
from control_api.feed_cursor import Cursor
from control_api.routes.responses import refusals
from control_api.schemas import CheckpointList, EventList, MetricList
from control_api.store import checkpoints, events, metrics

router = APIRouter(prefix="/v1/runs/{run}", tags=["runs"])


@router.get("/checkpoints", operation_id="list_checkpoints", responses=refusals(404, has_body=False))
def list_checkpoints(run: str, services: ServicesDep, page: PageDep) -> CheckpointList:
    """Complete checkpoints on the trainers' disks."""
    with services.database.read() as session:
        rows = checkpoints.page(session, require_run(session, run).id, after=page.after, size=page.size)
        token = page.token_after([one.id for one in rows])
        return CheckpointList(checkpoints=[views.checkpoint(one) for one in rows], next_page_token=token)


@router.get("/metrics", operation_id="list_metrics", responses=refusals(404, has_body=False))
def list_metrics(run: str, services: ServicesDep, page: PageDep) -> MetricList:
    """Every step as it was measured, in the order of arrival."""
    with services.database.read() as session:
        rows = metrics.page(session, require_run(session, run).id, after=page.after, size=page.size)
        token = page.token_after([one.id for one in rows])
        return MetricList(metrics=[views.metric(one) for one in rows], next_page_token=token)


@router.get("/events", operation_id="list_events", responses=refusals(404, has_body=False))
def list_events(run: str, services: ServicesDep, page: PageDep) -> EventList:
    """What happened to the run."""
    with services.database.read() as session:
        rows = events.page(session, require_run(session, run).id, after=page.after, size=page.size)
        token = page.token_after([one.id for one in rows])
        return EventList(events=[views.event(one) for one in rows], next_page_token=token)


@router.get(
    "/events:stream",
    operation_id="stream_events",
    response_class=StreamingResponse,
    responses=refusals(404, has_body=False)
    | {200: {"content": {"text/event-stream": {}}, "description": "`event` and `metric` messages"}},
)
def stream_events(
    run: str,
    services: ServicesDep,
    cursor: Annotated[str, Query(max_length=64, description="Start after this; default: the beginning")] = "",
    last_event_id: Annotated[str, Header(max_length=64, description="Sent by a client that comes back")] = "",
) -> StreamingResponse:
    """Server-sent events: everything after the cursor, then what happens, until the run is deleted."""
    start = Cursor.parse(last_event_id or cursor)
    with services.database.read() as session:
        run_id = require_run(session, run).id
    return StreamingResponse(
        services.feed.messages(run_id, start),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )
