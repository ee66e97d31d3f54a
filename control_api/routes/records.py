"""/v1/runs/{run}/…: what a run leaves behind, as lists and as streams."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from control_api import views
from control_api.dependencies import PageDep, ServicesDep, require_run
from control_api.feed import logs_after, records_after
from control_api.feed_cursor import Cursor, parse_line
from control_api.routes.responses import refusals
from control_api.schemas import CheckpointList, EventList, LogList, MetricList
from control_api.store import checkpoints, events, logs, metrics

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


Tail = Annotated[int | None, Query(ge=0, le=logs.KEPT_LINES, description="Begin so many lines before the end")]


@router.get("/logs", operation_id="list_logs", responses=refusals(404, has_body=False))
def list_logs(run: str, services: ServicesDep, page: PageDep, tail: Tail = None) -> LogList:
    """What the training processes wrote: the newest 10,000 lines of all attempts. A page_token goes before tail."""
    with services.database.read() as session:
        run_id = require_run(session, run).id
        after = page.after if page.after or tail is None else logs.before_newest(session, run_id, tail)
        rows = logs.page(session, run_id, after=after, size=page.size)
        token = page.token_after([one.id for one in rows])
        return LogList(logs=[views.log_line(one) for one in rows], next_page_token=token)


StartCursor = Annotated[str, Query(max_length=64, description="Start after this; default: the beginning")]
LastEventId = Annotated[str, Header(max_length=64, description="Sent by a client that comes back")]


@router.get(
    "/events:stream",
    operation_id="stream_events",
    response_class=StreamingResponse,
    responses=refusals(404, has_body=False)
    | {200: {"content": {"text/event-stream": {}}, "description": "`event` and `metric` messages"}},
)
def stream_events(
    run: str, services: ServicesDep, cursor: StartCursor = "", last_event_id: LastEventId = ""
) -> StreamingResponse:
    """Server-sent events: everything after the cursor, then what happens, until the run is deleted."""
    start = Cursor.parse(last_event_id or cursor)
    with services.database.read() as session:
        run_id = require_run(session, run).id
    return _stream(services.feed.messages(run_id, start, records_after))


@router.get(
    "/logs:stream",
    operation_id="stream_logs",
    response_class=StreamingResponse,
    responses=refusals(404, has_body=False)
    | {200: {"content": {"text/event-stream": {}}, "description": "`log` and `state` messages"}},
)
def stream_logs(
    run: str, services: ServicesDep, cursor: StartCursor = "", last_event_id: LastEventId = "", tail: Tail = None
) -> StreamingResponse:
    """Server-sent events: the lines after the cursor, or the last `tail`, then those that come, and between them the
    run's state, each behind the last line that it was reported with."""
    place = last_event_id or cursor
    start = parse_line(place) if place else 0
    with services.database.read() as session:
        run_id = require_run(session, run).id
        if not place and tail is not None:
            start = logs.before_newest(session, run_id, tail)
    return _stream(services.feed.messages(run_id, start, logs_after, with_state=True))


def _stream(messages: AsyncIterator[str]) -> StreamingResponse:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(messages, media_type="text/event-stream", headers=headers)
