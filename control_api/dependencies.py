"""What routes ask for by type: the database, the clock, a page, a run that exists."""

import base64
import binascii
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Header, Query, Request, Response
from pydantic import BaseModel
from sqlalchemy.orm import Session

from control_api.exporter import Exporter
from control_api.feed import Feed
from control_api.prober import TargetProber
from control_api.reconciler import Reconciler
from control_api.settings import Settings
from control_api.store import answers, runs, targets, trainers
from control_api.store.database import Database
from control_api.store.tables import RememberedAnswer, Run, Target, Trainer
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

Found = TypeVar("Found")


@dataclass(frozen=True)
class Services:
    """The long-lived parts of a server."""

    database: Database
    settings: Settings
    clock: Callable[[], float]
    reconciler: Reconciler
    prober: TargetProber
    feed: Feed
    exporter: Exporter


async def get_services(request: Request) -> Services:
    """Those of the application that serves the request."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


ServicesDep = Annotated[Services, Depends(get_services)]


@dataclass(frozen=True)
class Page:
    """Which part of a list is asked for."""

    after: int
    """Id of the last row of the page before."""
    size: int

    def token_after(self, ids: list[int]) -> str | None:
        """The token of the next page; None when this page was not full."""
        return base64.urlsafe_b64encode(b"after:%d" % ids[-1]).decode() if len(ids) == self.size else None


async def get_page(
    page_size: Annotated[int, Query(ge=1, le=1000)] = 100,
    page_token: Annotated[str, Query(max_length=64, description="next_page_token of the page before")] = "",
) -> Page:
    """From the query.

    Raises:
        SlipstreamError: REQUEST_INVALID, a token that no list has given.
    """
    if not page_token:
        return Page(0, page_size)
    try:
        word, _, number = base64.urlsafe_b64decode(page_token.encode()).partition(b":")
    except (binascii.Error, ValueError):
        word, number = b"", b""
    if word != b"after" or not number.isdigit() or len(number) > 15:
        raise SlipstreamError(
            "The page_token is none of ours.",
            reason=Reason.REQUEST_INVALID,
            remedy="Give next_page_token of the page before, or nothing.",
        )
    return Page(int(number), page_size)


PageDep = Annotated[Page, Depends(get_page)]


class Once:
    """Answers a change of state, and the same request with the same Idempotency-Key with the same answer."""

    def __init__(self, services: Services, key: str | None, request_hash: str) -> None:
        self._services = services
        self._key = key
        self._request_hash = request_hash

    def __call__(self, action: Callable[[Session], BaseModel | None], *, status: int = 200) -> Response:
        """Run `action` in a transaction and answer what it returns; refusals undo it and are not remembered.

        Raises:
            SlipstreamError: IDEMPOTENCY_KEY_REUSED, and whatever `action` raises.
        """
        now = self._services.clock()
        with self._services.database.write() as session:
            if self._key is not None and (known := answers.find(session, self._key, now=now)) is not None:
                return self._again(known)
            result = action(session)
            body = result.model_dump_json() if result is not None else ""
            if self._key is not None:
                fields = {"request_hash": self._request_hash, "status": status, "body": body, "created_at": now}
                answers.remember(session, RememberedAnswer(key=self._key, **fields))
        return _answer(body, status)

    def answered_before(self) -> Response | None:
        """For what is not done in the database: the answer of the same request before, if there was one.

        Raises:
            SlipstreamError: IDEMPOTENCY_KEY_REUSED.
        """
        if self._key is None:
            return None
        with self._services.database.read() as session:
            known = answers.find(session, self._key, now=self._services.clock())
            return None if known is None else self._again(known)

    def _again(self, known: RememberedAnswer) -> Response:
        if known.request_hash != self._request_hash:
            raise SlipstreamError(
                "This Idempotency-Key was used for another request.",
                reason=Reason.IDEMPOTENCY_KEY_REUSED,
                remedy="Draw a new key for every new request.",
            )
        answer = _answer(known.body, known.status)
        answer.headers["Idempotency-Replayed"] = "true"
        return answer


def _answer(body: str, status: int) -> Response:
    return Response(body or None, status, media_type="application/json" if body else None)


async def get_once(
    request: Request,
    services: ServicesDep,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255, pattern=r"^[!-~]+$")] = None,
) -> Once:
    """Of this request: what makes two requests the same is method, path and body."""
    parts = (request.method.encode(), request.url.path.encode("utf-8", "surrogatepass"), await request.body())
    return Once(services, idempotency_key, hashlib.sha256(b"\0".join(parts)).hexdigest())


OnceDep = Annotated[Once, Depends(get_once)]


def require_run(session: Session, name: str) -> Run:
    """The run of this name.

    Raises:
        SlipstreamError: RUN_UNKNOWN.
    """
    return _require(runs.find(session, name), "run", name, Reason.RUN_UNKNOWN)


def require_target(session: Session, name: str) -> Target:
    """The target of this name.

    Raises:
        SlipstreamError: TARGET_UNKNOWN.
    """
    return _require(targets.find(session, name), "target", name, Reason.TARGET_UNKNOWN)


def require_trainer(session: Session, name: str) -> Trainer:
    """The trainer of this name.

    Raises:
        SlipstreamError: TRAINER_UNKNOWN.
    """
    return _require(trainers.find(session, name), "trainer", name, Reason.TRAINER_UNKNOWN)


def _require(found: Found | None, kind: str, name: str, reason: Reason) -> Found:
    if found is None:
        raise SlipstreamError(
            f"There is no {kind} {name[:80]!r}.", reason=reason, remedy=f"GET /v1/{kind}s lists those there are."
        )
    return found
