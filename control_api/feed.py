"""What happens to a run as server-sent events, in an order that can be taken up again at any place."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from control_api import views
from control_api.feed_cursor import Cursor
from control_api.store import events, logs, metrics
from control_api.store.database import Database
from control_api.store.tables import Run

Place = TypeVar("Place", Cursor, int)
Read = Callable[[Session, int, Place], tuple[list[str], Place]]
"""From the id of a run and a place in its stream to the next messages and the place behind them."""

_BATCH = 200


def records_after(session: Session, run_id: int, cursor: Cursor) -> tuple[list[str], Cursor]:
    """Events and metrics."""
    found: list[str] = []
    for event in events.page(session, run_id, after=cursor.event, size=_BATCH):
        cursor = Cursor(event.id, cursor.metric)
        found.append(_message("event", cursor, views.event(event).model_dump(mode="json")))
    for metric in metrics.page(session, run_id, after=cursor.metric, size=_BATCH):
        cursor = Cursor(cursor.event, metric.id)
        found.append(_message("metric", cursor, views.metric(metric).model_dump(mode="json")))
    return found, cursor


def logs_after(session: Session, run_id: int, line: int) -> tuple[list[str], int]:
    """Lines of the log; the place is the id of a line."""
    rows = logs.page(session, run_id, after=line, size=_BATCH)
    found = [_message("log", row.id, views.log_line(row).model_dump(mode="json")) for row in rows]
    return found, rows[-1].id if rows else line


class Feed:
    """Wakes the open streams of a run when something about it was committed."""

    def __init__(self, database: Database, keep_alive_seconds: float) -> None:
        self._database = database
        self._keep_alive_seconds = keep_alive_seconds
        self._lock = threading.Lock()
        self._watchers: dict[int, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self._closed = False
        database.add_listener(self._wake)

    def close(self) -> None:
        """End all streams; their clients come back with Last-Event-ID."""
        self._closed = True
        with self._lock:
            watched = frozenset(self._watchers)
        self._wake(watched)

    async def messages(
        self, run_id: int, place: Place, read: Read[Place], *, with_state: bool = False
    ) -> AsyncIterator[str]:
        """What `read` finds after `place`, then whatever comes, until the run is deleted or the server stops.

        `with_state`: the run's state as well, once everything is sent that was there while it had it.
        """
        told = None
        with self._watching(run_id) as news:
            yield ": connected\n\n"
            while not self._closed:
                news.clear()
                batch, place, state = await run_in_threadpool(self._after, run_id, place, read)
                for message in batch:
                    yield message
                if state is None:
                    yield _message("deleted", place, {})
                    return
                if with_state and len(batch) < _BATCH and state != told:
                    told = state
                    yield _message("state", place, {"state": state})
                if len(batch) < _BATCH and not await self._wait(news):
                    yield ": nothing new\n\n"

    async def _wait(self, news: asyncio.Event) -> bool:
        try:
            async with asyncio.timeout(self._keep_alive_seconds):
                await news.wait()
        except TimeoutError:
            return False
        return True

    def _after(self, run_id: int, place: Place, read: Read[Place]) -> tuple[list[str], Place, str | None]:
        """The next messages, the place behind them, and the run's state; None once the run is gone."""
        with self._database.read() as session:
            found, place = read(session, run_id, place)
            run = session.get(Run, run_id)
            return found, place, run.state if run is not None else None

    @contextmanager
    def _watching(self, run_id: int) -> Iterator[asyncio.Event]:
        watcher = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._watchers.setdefault(run_id, set()).add(watcher)
        try:
            yield watcher[1]
        finally:
            with self._lock:
                self._watchers[run_id].discard(watcher)
                if not self._watchers[run_id]:
                    del self._watchers[run_id]

    def _wake(self, runs: frozenset[int]) -> None:
        with self._lock:
            watchers = [one for run in runs for one in self._watchers.get(run, ())]
            # Under the lock: a loop is closed only after its streams have left.
            for loop, news in watchers:
                loop.call_soon_threadsafe(news.set)


def _message(kind: str, place: Cursor | int, data: dict[str, Any]) -> str:
    return f"event: {kind}\nid: {place}\ndata: {json.dumps(data)}\n\n"
