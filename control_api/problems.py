"""Errors as problem details (RFC 9457): whatever is not a success has this shape, the framework's own too."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from control_api.lifecycle import TransitionIllegalError
from slipstream.errors import SlipstreamError
from slipstream.run_spec.load import SpecInvalidError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.crash_report import summarize
from slipstream.telemetry.logs import log_event

MEDIA_TYPE = "application/problem+json"
TRACE_KEY = "slipstream_trace_id"
"""Where the trace id of a request is found in its scope."""
TRACE_HEADER = "X-Trace-Id"

_log = logging.getLogger(__name__)

_STATUS_OF = {
    Reason.SPEC_INVALID: HTTPStatus.UNPROCESSABLE_ENTITY,
    Reason.REQUEST_INVALID: HTTPStatus.UNPROCESSABLE_ENTITY,
    Reason.DATA_INVALID: HTTPStatus.UNPROCESSABLE_ENTITY,
    Reason.PATH_NOT_ALLOWED: HTTPStatus.UNPROCESSABLE_ENTITY,
    Reason.PROTOCOL_MISMATCH: HTTPStatus.UNPROCESSABLE_ENTITY,
    Reason.IDEMPOTENCY_KEY_REUSED: HTTPStatus.UNPROCESSABLE_ENTITY,
    Reason.RUN_UNKNOWN: HTTPStatus.NOT_FOUND,
    Reason.TARGET_UNKNOWN: HTTPStatus.NOT_FOUND,
    Reason.TRAINER_UNKNOWN: HTTPStatus.NOT_FOUND,
    Reason.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Reason.CHECKPOINT_INVALID: HTTPStatus.CONFLICT,
    Reason.NAME_TAKEN: HTTPStatus.CONFLICT,
    Reason.TARGET_IN_USE: HTTPStatus.CONFLICT,
    # Of the target, not of this server, which is there.
    Reason.TARGET_UNREACHABLE: HTTPStatus.CONFLICT,
    Reason.LEDGER_UNWRITABLE: HTTPStatus.CONFLICT,
    Reason.SUBSCRIPTION_UNKNOWN: HTTPStatus.CONFLICT,
    Reason.TARGET_INCOMPATIBLE: HTTPStatus.CONFLICT,
    Reason.TARGET_FINGERPRINT_MISMATCH: HTTPStatus.CONFLICT,
    Reason.OUT_OF_MEMORY: HTTPStatus.CONFLICT,
    Reason.ENVIRONMENT_UNSUPPORTED: HTTPStatus.CONFLICT,
    Reason.TRANSITION_ILLEGAL: HTTPStatus.CONFLICT,
    Reason.TRAINER_BUSY: HTTPStatus.CONFLICT,
    Reason.TRAINER_IDLE: HTTPStatus.CONFLICT,
    Reason.TRAINER_LOST: HTTPStatus.CONFLICT,
    Reason.TRAINER_UNSUITABLE: HTTPStatus.CONFLICT,
    Reason.RUN_HAS_TRAINER: HTTPStatus.CONFLICT,
    Reason.NOT_READY: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.DATABASE_LOCKED: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.DATABASE_READ_ONLY: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.DATABASE_INVALID: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.DISK_FULL: HTTPStatus.SERVICE_UNAVAILABLE,
}

_REASON_OF = {
    400: Reason.REQUEST_INVALID,
    401: Reason.ACCESS_DENIED,
    403: Reason.ACCESS_DENIED,
    404: Reason.NOT_FOUND,
    405: Reason.METHOD_NOT_ALLOWED,
    413: Reason.BODY_TOO_LARGE,
    415: Reason.MEDIA_TYPE_UNSUPPORTED,
    422: Reason.REQUEST_INVALID,
}


@dataclass(frozen=True)
class Extras:
    """What a problem may have beside its status and detail."""

    reason: Reason | None = None
    errors: Sequence[Mapping[str, str]] = ()
    members: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None


def problem(scope: Scope, status: int, detail: str, extras: Extras = Extras()) -> JSONResponse:
    """A problem whose type is `about:blank`: status and reason say what it is, `detail` says what to do about it."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": int(status),
        "detail": _printable(detail),
        "reason": extras.reason or _REASON_OF.get(int(status), Reason.INTERNAL),
        "trace_id": scope.get(TRACE_KEY, ""),
    }
    if extras.errors:
        body["errors"] = [{key: _printable(text) for key, text in one.items()} for one in extras.errors]
    body |= extras.members or {}
    # Here too: the answer to a defect is made outside of all middleware.
    headers = {TRACE_HEADER: body["trace_id"]} | dict(extras.headers or {})
    return JSONResponse(body, status, headers=headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answer with problem details whatever goes wrong inside `app`."""
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(SlipstreamError, _refused)
    app.add_exception_handler(Exception, _unforeseen)


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND and detail == HTTPStatus.NOT_FOUND.phrase:
        detail = f"Nothing is served at {request.url.path}."
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"], detail = _what_is_allowed(request, headers.get("Allow", ""))
    return problem(request.scope, error.status_code, detail, Extras(headers=headers))


def _what_is_allowed(request: Request, said: str) -> tuple[str, str]:
    """All methods of the path, and the refusal in words; with the verbs, where one was meant.

    Args:
        request: whose method is refused.
        said: the methods that the framework found: those of one route, where the path may have several.
    """
    path = request.url.path
    paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    found = {name.upper() for template, methods in paths.items() if _matches(template, path) for name in methods}
    allowed = ", ".join(sorted(found)) or said
    stem, colon, _ = path.rpartition(":")
    known = {template.rpartition(":")[2] for template in paths if ":" in template}
    verbs = sorted(f":{verb}" for verb in known if any(_matches(one, f"{stem}:{verb}") for one in paths if ":" in one))
    if colon and verbs:
        return allowed, f"{path} is no verb; those of {stem} are {', '.join(verbs)}."
    return allowed, f"{path} accepts {allowed}, not {request.method}."


def _matches(template: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/:]+", template), path) is not None


def _validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = [{"location": _location(one), "detail": _words(one)} for one in error.errors()]
    detail = "The request does not fit what this path accepts; see errors."
    return problem(request.scope, HTTPStatus.UNPROCESSABLE_ENTITY, detail, Extras(errors=errors))


def _location(error: Mapping[str, Any]) -> str:
    """The path of the key; of a body that is no JSON, the body."""
    return "body" if error["type"] == "json_invalid" else ".".join(map(str, error["loc"]))


def _words(error: Mapping[str, Any]) -> str:
    """In the sender's terms: JSON, not Python."""
    if error["type"] == "json_invalid":
        return f"This is no JSON: {error['ctx']['error']}, at character {error['loc'][-1]}."
    if error["type"] == "model_attributes_type":
        return "Input should be a JSON object."
    return str(error["msg"]).removeprefix("Value error, ")


def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SlipstreamError)
    status = _STATUS_OF.get(error.reason)
    if status is None:
        return _unforeseen(request, error)
    detail, members = str(error), dict[str, Any]()
    errors: list[dict[str, str]] = []
    headers: dict[str, str] = {}
    if isinstance(error, TransitionIllegalError):
        members = {"current_state": error.state, "allowed_verbs": list(error.allowed)}
    if isinstance(error, SpecInvalidError):
        errors = [{"location": f"body.spec.{key}".rstrip("."), "detail": text} for key, text in error.problems]
        detail = error.message if errors else detail  # they say more than the remedy, which is for recipe files
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers = {"Retry-After": "2"}
        log_event(_log, "error", "unavailable", path=request.url.path, error=str(error))
    return problem(request.scope, status, detail, Extras(error.reason, errors, members, headers))


def _unforeseen(request: Request, error: Exception) -> JSONResponse:
    trace_id = request.scope.get(TRACE_KEY, "")
    log_event(_log, "error", "request_failed", trace_id=trace_id, error=summarize("control-api", error))
    return problem(
        request.scope,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        f"An error on our side; the server's log has more, under trace id {trace_id}.",
    )


def _printable(text: str) -> str:
    """Half a surrogate pair can be sent to us, as an escape in JSON, but not sent back."""
    return text.encode("utf-8", "replace").decode()
