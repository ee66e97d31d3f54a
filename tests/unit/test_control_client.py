"""The client of the control API: what it sends again, what it does not, and feeds over broken connections."""

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from slipstream import control_client
from slipstream.control_client import ControlApiRefusalError, ControlApiUnreachableError, ControlClient, segment
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

Script = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers every request with the next step of a script; the last one stays."""

    script: list[Script]
    requests: list[tuple[str, str, dict[str, str], bytes]]

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.requests.append((self.command, self.path, dict(self.headers), body))
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        step(self)

    do_GET = do_POST = do_PATCH = do_DELETE = handle_any  # noqa: N815 - the names are http.server's

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name is http.server's
        """Nothing on the terminal."""


@contextmanager
def server(*script: Script) -> Iterator[tuple[ControlClient, list[tuple[str, str, dict[str, str], bytes]]]]:
    """A client of a server that follows the script, and the requests that arrived."""
    kind = type("Scripted", (Handler,), {"script": list(script), "requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with ControlClient(f"127.0.0.1:{listening.server_address[1]}", "secret") as client:
                yield client, kind.requests  # type: ignore[attr-defined]
        finally:
            listening.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No waiting between attempts; what would have been waited for."""
    waited: list[int] = []
    monkeypatch.setattr(control_client, "_wait_before", waited.append)
    return waited


def answer(status: int, body: Any = None) -> Script:
    """JSON, or nothing."""

    def step(handler: Handler) -> None:
        raw = b"" if body is None else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    return step


def problem(status: int, reason: str, **more: Any) -> Script:
    """A problem as the API answers it."""
    return answer(status, {"title": "t", "status": status, "detail": f"It is {reason}.", "reason": reason} | more)


def hang_up(handler: Handler) -> None:
    """The server dies before it answers."""
    handler.close_connection = True
    handler.connection.close()


def messages(*ids: int, torn: str = "") -> Script:
    """A stream with these messages; then it breaks off, in the middle of another one if `torn`."""

    def step(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        for number in ids:
            handler.wfile.write(f'event: metric\nid: {number}-0\ndata: {{"step": {number}}}\n\n'.encode())
        handler.wfile.write(torn.encode())

    return step


BUSY = problem(503, "DATABASE_LOCKED")
PROXY = answer(502)


@pytest.mark.parametrize("trouble", [BUSY, problem(503, "NOT_READY"), PROXY, hang_up])
def test_what_may_be_over_soon_is_sent_again(trouble: Script, attempts: list[int]) -> None:
    with server(trouble, trouble, answer(200, {"name": "demo"})) as (client, requests):
        assert client.get("/v1/runs/demo") == {"name": "demo"}
        assert (len(requests), attempts) == (3, [1, 2])
    with server(trouble, answer(201, {"name": "demo"})) as (client, requests):
        assert client.post("/v1/runs", {"spec": {}}) == {"name": "demo"}
        keys = {headers["Idempotency-Key"] for _, _, headers, _ in requests}
        assert (len(requests), len(keys)) == (2, 1), "the same request, for the server too"
        assert {headers["Authorization"] for _, _, headers, _ in requests} == {"Bearer secret"}
    with server(trouble, answer(204)) as (client, requests):
        client.delete("/v1/runs/demo")
        assert len(requests) == 2


def test_it_gives_up_in_the_end(attempts: list[int]) -> None:
    with server(BUSY) as (client, requests):
        with pytest.raises(ControlApiRefusalError, match=r"It is DATABASE_LOCKED\."):
            client.get("/v1/runs")
        assert len(requests) == 4
    with server(PROXY) as (client, _), pytest.raises(ControlApiUnreachableError, match=r"no control API \(status 502"):
        client.get("/v1/runs")


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (problem(409, "TRANSITION_ILLEGAL"), Reason.TRANSITION_ILLEGAL),
        (problem(500, "INTERNAL"), Reason.INTERNAL),
        (problem(503, "DATABASE_READ_ONLY"), Reason.DATABASE_READ_ONLY),
        (problem(422, "OF_A_NEWER_VERSION"), Reason.INTERNAL),
    ],
)
def test_what_will_be_refused_again_is_not(step: Script, reason: Reason) -> None:
    with server(step) as (client, requests):
        with pytest.raises(ControlApiRefusalError) as refused:
            client.get("/v1/runs/demo")
        assert (refused.value.reason, len(requests)) == (reason, 1)
        again = pickle.loads(pickle.dumps(refused.value))
        assert (again.message, again.status) == (refused.value.message, refused.value.status)


def test_heartbeats_are_sent_once() -> None:
    with server(BUSY) as (client, requests):
        with pytest.raises(ControlApiRefusalError):
            client.post_once("/v1/trainers/t1:heartbeat", {})
        assert len(requests) == 1


def test_errors_of_a_definition_are_said_once() -> None:
    errors = [{"location": "body.note", "detail": "too long"}, {"location": "body.spec.x", "detail": "SPEC_INVALID"}]
    with server(problem(422, "SPEC_INVALID", errors=errors)) as (client, _), pytest.raises(SlipstreamError) as refused:
        client.get("/v1/runs")
    assert refused.value.message == "It is SPEC_INVALID.\n  body.note: too long"


def test_a_listing_reads_page_after_page() -> None:
    first, last = {"runs": [1, 2], "next_page_token": "t"}, {"total": 3, "runs": [3], "next_page_token": None}
    with server(answer(200, first), answer(200, last)) as (client, requests):
        assert list(client.listing("/v1/runs", state=None)) == [1, 2, 3]
        assert [path for _, path, _, _ in requests] == [
            "/v1/runs?page_size=200",
            "/v1/runs?page_size=200&page_token=t",
        ]


# ---- feeds


def test_a_feed_goes_on_where_it_was_broken_off() -> None:
    torn = 'event: metric\nid: 4-0\ndata: {"st'
    lost: list[str] = []
    script = (messages(1, 2), BUSY, PROXY, messages(3, torn=torn), hang_up, messages(4, 5))
    with server(*script, problem(404, "RUN_UNKNOWN")) as (client, requests):
        feed = client.feed("demo", "0-0", on_loss=lambda why: lost.append(why.message))
        seen: list[int] = []
        with pytest.raises(ControlApiRefusalError, match="RUN_UNKNOWN"):
            seen.extend(message.data["step"] for message in feed)
    assert seen == [1, 2, 3, 4, 5]
    cursors = [path.partition("cursor=")[2] for _, path, _, _ in requests]
    assert cursors == ["0-0", "2-0", "2-0", "2-0", "3-0", "3-0", "5-0"]
    assert len(lost) == 3, "once for every connection that was lost"


def test_a_feed_ends_with_its_run() -> None:
    def deleted(handler: Handler) -> None:
        messages(1, torn="event: deleted\nid: 2-0\ndata: {}\n\n")(handler)

    with server(deleted) as (client, requests):
        assert [message.kind for message in client.feed("demo")] == ["metric", "deleted"]
        assert len(requests) == 1


def test_a_feed_gives_up_when_nobody_answers(attempts: list[int]) -> None:
    with server(PROXY) as (client, _), pytest.raises(ControlApiUnreachableError):
        next(client.feed("demo", patience=0.0))


def test_logs_have_a_feed_of_their_own() -> None:
    with server(messages(1)) as (client, requests):
        assert next(client.log_feed("de mo", "7")).data == {"step": 1}
        assert requests[0][1] == "/v1/runs/de%20mo/logs:stream?cursor=7"


# ---- addresses and names


@pytest.mark.parametrize(
    "address", ["", "http://", "ftp://h", "http://h:port", "http://[::1", "http://h:99999", "http://a b"]
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(SlipstreamError) as refused:
        ControlClient(address)
    assert refused.value.reason is Reason.SPEC_INVALID


def test_nobody_there() -> None:
    with ControlClient("127.0.0.1:1") as client, pytest.raises(ControlApiUnreachableError) as refused:
        client.get("/v1/runs")
    assert refused.value.message.startswith("no control API answers at http://127.0.0.1:1 (")
    assert refused.value.exit_code == 15


@pytest.mark.parametrize(
    ("name", "path"), [("demo", "demo"), ("a b", "a%20b"), ("é", "%C3%A9"), ("%2F", "%252F"), ("\udcff", "%FF")]
)
def test_names_in_paths(name: str, path: str) -> None:
    assert segment(name) == path


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/"])
def test_names_that_would_reach_elsewhere(name: str) -> None:
    with pytest.raises(SlipstreamError) as refused:
        segment(name)
    assert refused.value.reason is Reason.NOT_FOUND


@pytest.mark.parametrize(("long_seconds", "times"), [(60.0, 0), (-1.0, 1)], ids=["quick", "long"])
def test_who_waits_for_long_is_told_once(monkeypatch: pytest.MonkeyPatch, long_seconds: float, times: int) -> None:
    monkeypatch.setattr(control_client, "_LONG_SECONDS", long_seconds)
    said: list[SlipstreamError] = []
    with (
        server(answer(503), answer(503), answer(200, {"a": 1})) as (client, _),
        ControlClient(client.address, on_delay=said.append) as patient,
    ):
        assert patient.get("/x") == {"a": 1}
    assert [one.message.endswith("(status 503)") for one in said] == [True] * times
