"""The FastAPI application: liveness, readiness, and one bearer token for everything else."""

import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from control_api import problems
from slipstream import __version__

# Probes of an orchestrator carry no token.
_OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class Health(BaseModel):
    """Answer of a probe."""

    status: str
    version: str


def create_app(token: str | None = None) -> FastAPI:
    """The application; with a token, every path but the probes asks for `Authorization: Bearer TOKEN`."""
    app = FastAPI(title="Slipstream control API", version=__version__)
    problems.install(app)
    if token:
        app.middleware("http")(_bearer_check(token))

    @app.get("/healthz", operation_id="get_health")
    async def healthz() -> Health:
        """The process answers."""
        return Health(status="ok", version=__version__)

    @app.get("/readyz", operation_id="get_readiness")
    async def readyz() -> Health:
        """The process can do its work."""
        return Health(status="ready", version=__version__)

    return app


def _bearer_check(token: str) -> Callable[[Request, Callable[[Request], Awaitable[Response]]], Awaitable[Response]]:
    expected = f"Bearer {token}".encode()

    async def check(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "").encode()
        if request.url.path in _OPEN_PATHS or secrets.compare_digest(given, expected):
            return await call_next(request)
        return problems.problem(
            HTTPStatus.UNAUTHORIZED,
            "This server asks for a token: send 'Authorization: Bearer TOKEN'.",
            headers={"WWW-Authenticate": "Bearer"},
        )

    return check
