"""The refusals that each route documents."""

from http import HTTPStatus
from typing import Any

from control_api.schemas import Problem

_EVERYWHERE = (401, 403, 422, 500, 503)
_WITH_BODY = (400, 413, 415)


def refusals(*statuses: int, has_body: bool = True) -> dict[int | str, dict[str, Any]]:
    """For `responses=` of a route: these, those of every route and, unless it only reads, those of taking a body."""
    every = {*statuses, *_EVERYWHERE, *(_WITH_BODY if has_body else ())}
    return {status: {"model": Problem, "description": HTTPStatus(status).phrase} for status in sorted(every)}
