"""A client of the control API: JSON in, JSON out, problems raised. For the command line and the trainer agent."""

import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import httpx2

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

DEFAULT_ADDRESS = "http://127.0.0.1:8080"
_LAST_PORT = 65535
_TIMEOUT = httpx2.Timeout(10.0, connect=5.0)
# The server says something every 15 s, even if nothing happens.
_STREAM_TIMEOUT = httpx2.Timeout(40.0, connect=5.0)
_LONG_SECONDS = 2.0
"""Whoever has waited for so long is told what for."""
_TRIES = 4
_PAGE = 200
_PATIENCE_SECONDS = 120.0
_TEMPORARY = frozenset({Reason.NOT_READY, Reason.DATABASE_LOCKED})


class ControlApiUnreachableError(SlipstreamError):
    """Nobody answers at the address, or only a proxy does; the request may be sent again later."""


class ControlApiRefusalError(SlipstreamError):
    """The control API answered with a problem; `problem` is its body, `status` the HTTP status."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.problem = dict(problem)
        super().__init__(_in_words(self.problem), reason=_reason(self.problem))

    def __reduce__(self) -> tuple[object, ...]:
        """Survive the way from a worker process to its parent."""
        return ControlApiRefusalError, (self.status, self.problem)


@dataclass(frozen=True)
class FeedMessage:
    """One message of a run's feed."""

    kind: str
    """`event`, `metric`, `log`, `state` or `deleted`."""
    cursor: str
    """Where to go on after this message."""
    data: dict[str, Any]


OnLoss = Callable[[SlipstreamError], None]


class ControlClient:
    """Requests to one control API. Not for several threads at once."""

    def __init__(
        self, address: str = DEFAULT_ADDRESS, token: str | None = None, *, on_delay: OnLoss | None = None
    ) -> None:
        """No request is sent yet.

        Args:
            address: `http://HOST:PORT`, or `HOST:PORT`.
            token: bearer token.
            on_delay: called once for every request that has taken long and is sent again, with why.

        Raises:
            SlipstreamError: SPEC_INVALID, the address is no URL.
        """
        self._on_delay = on_delay
        self.address = address if "://" in address else f"http://{address}"
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx2.Client(base_url=self.address, headers=headers, timeout=_TIMEOUT, trust_env=False)
            url = self._http.base_url
            usable = url.scheme in ("http", "https") and bool(url.host) and (url.port or 0) <= _LAST_PORT
            usable = usable and address.split() == [address]
        except httpx2.InvalidURL:
            usable = False
        if not usable:
            raise SlipstreamError(
                f"{address!r} is no address of a control API",
                reason=Reason.SPEC_INVALID,
                remedy=f"Example: {DEFAULT_ADDRESS}",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """GET; `query` without its None values.

        Raises:
            ControlApiRefusalError: a problem was answered.
            ControlApiUnreachableError: nobody answered, several times.
        """
        return self._patiently("GET", path, params={key: value for key, value in query.items() if value is not None})

    def listing(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """The entries of a list, over all its pages, as they are needed. Raises as `get`."""
        token: str | None = None
        while True:
            page = self.get(path, page_size=_PAGE, page_token=token, **query)
            token = page["next_page_token"]
            yield from next(entries for entries in page.values() if isinstance(entries, list))
            if token is None:
                return

    def post(self, path: str, body: Any = None) -> dict[str, Any]:
        """A create or a verb, sent until it is answered: an Idempotency-Key makes it count once. Raises as `get`."""
        return self._patiently("POST", path, json=body, headers={"Idempotency-Key": uuid.uuid4().hex})

    def post_once(self, path: str, body: Any, *, timeout: float = 10.0) -> dict[str, Any]:
        """One attempt, without a key: what is repeated anyway (heartbeats). Raises as `get`, after one attempt."""
        return self._send("POST", path, json=body, timeout=timeout)

    def patch(self, path: str, body: Any) -> dict[str, Any]:
        """PATCH. Raises as `get`."""
        return self._patiently("PATCH", path, json=body, headers={"Idempotency-Key": uuid.uuid4().hex})

    def delete(self, path: str) -> None:
        """DELETE. Raises as `get`."""
        self._patiently("DELETE", path, headers={"Idempotency-Key": uuid.uuid4().hex})

    def feed(
        self, run: str, cursor: str = "", *, on_loss: OnLoss | None = None, patience: float = _PATIENCE_SECONDS
    ) -> Iterator[FeedMessage]:
        """Everything that happens to a run after `cursor`, without end; a lost connection is taken up again.

        Args:
            run: its name.
            cursor: a run's `event_cursor`, or a message's; nothing: from the beginning.
            on_loss: called once for every connection that was lost, with why.
            patience: seconds without a connection after which it gives up.

        Raises:
            ControlApiRefusalError: a problem was answered, such as RUN_UNKNOWN.
            ControlApiUnreachableError: nobody answers, for `patience` seconds.
        """
        return self._follow(f"/v1/runs/{segment(run)}/events:stream", cursor, on_loss, patience)

    def log_feed(
        self, run: str, cursor: str = "", *, on_loss: OnLoss | None = None, patience: float = _PATIENCE_SECONDS
    ) -> Iterator[FeedMessage]:
        """The lines that a run's training processes log, and its state whenever all of them up to now are there;
        otherwise as `feed`."""
        return self._follow(f"/v1/runs/{segment(run)}/logs:stream", cursor, on_loss, patience)

    def _follow(self, path: str, cursor: str, on_loss: OnLoss | None, patience: float) -> Iterator[FeedMessage]:
        failures, gives_up_at = 0, time.monotonic() + patience
        while True:
            try:
                for message in self._listen(path, cursor):
                    failures, gives_up_at = 0, time.monotonic() + patience
                    if message is None:
                        continue
                    cursor = message.cursor
                    yield message
                    if message.kind == "deleted":
                        return
            except (ControlApiUnreachableError, ControlApiRefusalError) as lost:
                if not is_temporary(lost) or time.monotonic() > gives_up_at:
                    raise
                failures += 1
                if failures == 1 and on_loss is not None:
                    on_loss(lost)
            _wait_before(failures)

    def _listen(self, path: str, cursor: str) -> Iterator[FeedMessage | None]:
        """The messages of one connection, after a None that says that there is one. Ends with an exception."""
        try:
            with self._http.stream("GET", path, params={"cursor": cursor}, timeout=_STREAM_TIMEOUT) as response:
                if response.status_code != 200:
                    response.read()
                    self._result(response)
                yield None
                for event in httpx2.EventSource(response):
                    data: dict[str, Any] = json.loads(event.data)
                    yield FeedMessage(event.event, event.id, data)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error
        raise self._unreachable("it has ended the stream")

    def _patiently(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        """Several attempts: every request that comes here counts once, however often it arrives."""
        say, long_at = self._on_delay, time.monotonic() + _LONG_SECONDS
        for attempt in range(1, _TRIES):
            try:
                return self._send(method, path, **more)
            except (ControlApiUnreachableError, ControlApiRefusalError) as error:
                if not is_temporary(error):
                    raise
                if say is not None and time.monotonic() > long_at:
                    say(error)
                    say = None
            _wait_before(attempt)
        return self._send(method, path, **more)

    def _send(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            return self._result(self._http.request(method, path, **more))
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error

    def _result(self, response: httpx2.Response) -> dict[str, Any]:
        if response.status_code == 204:
            return {}
        try:
            body = response.json()
        except ValueError:
            body = None
        if response.is_success and isinstance(body, dict):
            return body
        if isinstance(body, dict) and "reason" in body:
            raise ControlApiRefusalError(response.status_code, body)
        raise ControlApiUnreachableError(
            f"what answers at {self.address} is no control API (status {response.status_code})",
            reason=Reason.NOT_READY,
            remedy="Give the address of a control API with --api or SLIPSTREAM_API.",
        )

    def _unreachable(self, why: Exception | str) -> ControlApiUnreachableError:
        return ControlApiUnreachableError(
            f"no control API answers at {self.address} ({str(why) or type(why).__name__})",
            reason=Reason.NOT_READY,
            remedy="Start one with `slipstream up`, or give its address with --api or SLIPSTREAM_API.",
        )


def segment(name: str) -> str:
    """A name as one segment of a path, whatever characters it has.

    Raises:
        SlipstreamError: NOT_FOUND, the name would reach another path than one of its own.
    """
    # Servers decode %2F before they look for the path, and dots are taken out on the way.
    if name in ("", ".", "..") or "/" in name:
        raise SlipstreamError(
            f"Nothing is called {name!r}.",
            reason=Reason.NOT_FOUND,
            remedy="Names have lower case letters, digits, dot, dash and underscore.",
        )
    return quote(name, safe="", errors="surrogateescape")


def is_temporary(error: SlipstreamError) -> bool:
    """Whether the same request may be accepted soon."""
    return isinstance(error, ControlApiUnreachableError) or error.reason in _TEMPORARY


def _wait_before(attempt: int) -> None:
    """Exponential, at most 5 s, with jitter: many clients of one API that restarts do not return at once."""
    time.sleep(min(0.2 * 2**attempt, 5.0) * (0.5 + random.random() / 2))


def _reason(problem: Mapping[str, Any]) -> Reason:
    try:
        return Reason(problem["reason"])
    except ValueError:  # of a newer control API
        return Reason.INTERNAL


def _in_words(problem: Mapping[str, Any]) -> str:
    detail = str(problem.get("detail") or problem.get("title"))
    # The problems of a run definition are in the detail already.
    errors = [one for one in problem.get("errors") or () if one["detail"] not in detail]
    return "\n  ".join([detail, *(f"{one['location']}: {one['detail']}" for one in errors)])
