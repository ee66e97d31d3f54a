"""The FastAPI application: routes, rules that hold for all of them, and the threads behind them."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from control_api import problems
from control_api.dependencies import Services
from control_api.exporter import Exporter
from control_api.feed import Feed
from control_api.middleware import BearerToken, BodyRules, OwnPagesOnly, TraceId
from control_api.prober import TargetProber
from control_api.reconciler import Reconciler
from control_api.routes import dashboard, exports, health, recipes, records, runs, targets, trainers
from control_api.settings import Settings
from control_api.store.database import Database
from slipstream import __version__


def create_app(
    database: Database,
    settings: Settings,
    *,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The application. Its threads run while its lifespan does.

    Args:
        database: open; it stays the caller's to close.
        settings: of the deployment.
        clock: seconds since the epoch.
    """
    # FastAPI's own pages load scripts from elsewhere, into an origin that can stop runs; /openapi.json is there.
    app = FastAPI(
        title="Slipstream control API",
        version=__version__,
        lifespan=_lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = build_services(database, settings, clock)
    problems.install(app)
    # The last one added sees a request first.
    app.add_middleware(BodyRules, limit=settings.body_limit)
    if settings.token:
        app.add_middleware(BearerToken, token=settings.token)
    app.add_middleware(OwnPagesOnly, any_host=bool(settings.token))
    app.add_middleware(TraceId)
    for module in (health, targets, recipes, records, exports, runs, trainers):
        app.include_router(module.router)
    dashboard.install(app)
    describe_plainly = app.openapi
    app.openapi = lambda: _with_problem_type(describe_plainly())  # type: ignore[method-assign]
    return app


def build_services(database: Database, settings: Settings, clock: Callable[[], float]) -> Services:
    """The parts behind the routes; no thread is started."""
    reconciler = Reconciler(database, settings, clock)
    prober = TargetProber(database, settings, clock)
    prober.add_listener(reconciler.wake)
    feed = Feed(database, settings.keep_alive_seconds)
    exporter = Exporter(settings.export_root, clock)
    return Services(database, settings, clock, reconciler, prober, feed, exporter)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    services.reconciler.start()
    services.prober.start()
    services.exporter.start()
    try:
        yield
    finally:
        services.feed.close()
        services.exporter.stop()
        services.prober.stop()
        services.reconciler.stop()


def _with_problem_type(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the media type that refusals really have."""
    for path in document["paths"].values():
        for operation in path.values():
            for status, response in operation["responses"].items():
                content = response.get("content", {})
                if status >= "400" and "application/json" in content:
                    content[problems.MEDIA_TYPE] = content.pop("application/json")
    return document
