"""What every request passes before a route: trace id, token, media type, size of the body. Plain ASGI."""

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_api.problems import TRACE_HEADER, TRACE_KEY, Extras, problem
from slipstream.listen import ListenAddress

# Probes of an orchestrator carry no token, nor does a browser that opens a page: the page asks for it.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/", "/dashboard"})
OPEN_PREFIX = "/dashboard/"

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_MOST_DRAINED_BYTES = 2**28


class TraceId:
    """Names every request: by the caller's `traceparent`, else at random. The answer carries the name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _TRACEPARENT.fullmatch(Headers(scope=scope).get("traceparent", ""))
        scope[TRACE_KEY] = given.group(1) if given else secrets.token_hex(16)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[TRACE_HEADER] = scope[TRACE_KEY]
            await send(message)

        await self._app(scope, receive, send_named)


class BearerToken:
    """Every path but the probes and the dashboard's files asks for `Authorization: Bearer TOKEN`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http" and not _is_open(scope["path"]):
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not secrets.compare_digest(given, self._expected):
                detail = "This server asks for a token: send 'Authorization: Bearer TOKEN'."
                answer = problem(scope, 401, detail, Extras(headers={"WWW-Authenticate": "Bearer"}))
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


class OwnPagesOnly:
    """Keeps pages of other sites, which a browser on this machine may show, from using the API behind its user's back.

    A verb has no body, so such a page could send one without asking first; and a name of its own that it lets point to
    loopback would make its requests look like ours. Whoever has to show a token is safe from the second.
    """

    def __init__(self, app: ASGIApp, any_host: bool) -> None:
        """`any_host`: do not look at the name under which the server was addressed."""
        self._app = app
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http" and (detail := self._objection(scope)):
            await problem(scope, 403, detail)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD", "OPTIONS") and _is_of_another_site(headers):
            return "The request comes from a page of another site; open the dashboard of this server instead."
        host = headers.get("host", "")
        if not self._any_host and host and not ListenAddress(_without_port(host), 0).is_loopback:
            return (
                f"This server has no token and answers on loopback only, not as {host[:80]!r}; "
                "address it as 127.0.0.1 or localhost, or start it with a token."
            )
        return None


def _is_of_another_site(headers: Headers) -> bool:
    """Browsers set one of these, and no page can; other clients send neither."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    # Of an older browser, and of any over plain http from another machine: the page's own address, or `null`.
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()


def _without_port(host: str) -> str:
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.strip("[]").lower()


class BodyRules:
    """A body is JSON, says so, and is no longer than the limit, whatever its length is declared to be."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        length = int(declared) if declared.isdecimal() else 0
        if length > self._limit:
            # A client that still writes would not read our answer: take what it sends, and keep none of it.
            await _drain(receive)
            await problem(scope, 413, self._too_large())(scope, receive, send)
            return
        has_body = length > 0 or "transfer-encoding" in headers
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if has_body and kind != "application/json":
            detail = f"The body is {kind or 'of no stated type'}; send JSON with Content-Type: application/json."
            await problem(scope, 415, detail)(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        received = 0

        async def count() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._limit:
                    if message.get("more_body", False):
                        await _drain(receive)
                    raise HTTPException(413, self._too_large())
            return message

        return count

    def _too_large(self) -> str:
        return f"The body is larger than {self._limit} bytes."


async def _drain(receive: Receive) -> None:
    drained, more = 0, True
    while more and drained < _MOST_DRAINED_BYTES:
        message = await receive()
        drained += len(message.get("body", b""))
        more = message["type"] == "http.request" and message.get("more_body", False)
