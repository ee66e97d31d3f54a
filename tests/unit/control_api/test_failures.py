"""What goes wrong while the server serves: a full disk, a lock, a file nobody may write, requests of absurd size."""

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from control_api.app import create_app
from control_api.dependencies import Services
from control_api.settings import Settings
from control_api.store.database import Database
from slipstream.errors import SlipstreamError
from tests.fakes.control_plane import SPEC, Desk, assert_problem, record, report
from tests.fakes.http_server import serving

Break = Callable[[Database], Callable[[], None]]
"""Breaks a database that is in use; what it returns mends it."""


def pragma(breaks: str, mends: str) -> Break:
    """By a setting of the one connection that the test's requests share."""

    def run(database: Database, statement: str) -> None:
        with database.read() as session:
            session.execute(text(statement))

    def apply(database: Database) -> Callable[[], None]:
        run(database, breaks)
        return lambda: run(database, mends)

    return apply


def lock(database: Database) -> Callable[[], None]:
    """Another process writes, for longer than anybody waits."""
    other = Database(f"sqlite:///{database.path}")
    writing = other.write()
    writing.__enter__()

    def mend() -> None:
        writing.__exit__(None, None, None)
        other.close()

    return mend


BREAKS = {
    "DISK_FULL": pragma("PRAGMA max_page_count = 1", "PRAGMA max_page_count = 1073741823"),
    "DATABASE_READ_ONLY": pragma("PRAGMA query_only = ON", "PRAGMA query_only = OFF"),
    "DATABASE_LOCKED": lock,
}


def every_write(work: int) -> list[tuple[str, str, Any]]:
    """Requests that change something, each too large for what is left free in the file's pages."""
    long = {"first_line": 0, "lines": ["x" * 2000] * 200}
    metrics = {"first_index": 0, "records": [record(step) for step in range(100)]}
    beat = {"instance_id": "t1-1", "report": report(work, "RUNNING", metrics=metrics, logs=long)}
    return [
        ("POST", "/v1/trainers/t1:heartbeat", beat),
        ("PATCH", "/v1/runs/demo", {"note": "x" * 4000}),
        ("POST", "/v1/runs", {"spec": SPEC | {"name": "second"}, "note": "x" * 4000}),
    ]


@pytest.mark.parametrize("reason", BREAKS)
def test_said_in_words_while_it_lasts_and_nothing_is_lost(
    client: TestClient, desk: Desk, services: Services, database: Database, reason: str
) -> None:
    work = desk.running()
    requests = every_write(work)
    mend = BREAKS[reason](database)
    for method, path, body in requests:
        response = client.request(method, path, json=body, headers={"Idempotency-Key": path})
        refusal = assert_problem(response, 503, reason)
        assert str(database.path) in refusal["detail"]
        assert response.headers["retry-after"] == "2"
    with suppress(SlipstreamError):  # a pass may find that there is nothing to write
        services.reconciler.reconcile()
    assert desk.state() == "RUNNING", "reading goes on, and half a change is none"
    assert desk.get("runs/demo/metrics")["metrics"] == []
    assert [one["note"] for one in desk.get("runs")["runs"]] == [""]
    mend()
    for method, path, body in requests:
        response = client.request(method, path, json=body, headers={"Idempotency-Key": path})
        assert response.is_success, response.text
    services.reconciler.reconcile()
    assert [one["note"] for one in desk.get("runs")["runs"]] == ["x" * 4000] * 2
    assert len(desk.get("runs/demo/logs?page_size=1000")["logs"]) == 200


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    database = Database(f"sqlite:///{tmp_path}/served.sqlite")
    with serving(create_app(database, Settings())) as url:
        yield url.removeprefix("http://")
    database.close()


@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "chunked"])
def test_100_megabytes_over_a_real_socket(address: str, is_declared: bool) -> None:
    block = b" " * 2**20
    headers = {"Content-Type": "application/json"}
    if is_declared:
        headers["Content-Length"] = str(100 * len(block))
    connection = HTTPConnection(address, timeout=50)
    connection.request("POST", "/v1/runs", (block for _ in range(100)), headers=headers, encode_chunked=not is_declared)
    response = connection.getresponse()
    assert (response.status, b"BODY_TOO_LARGE" in response.read()) == (413, True)
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200, "the connection can be used again"
    connection.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET /v1/runs HTTP/9.9\r\n\r\n",
        b"GET " + b"/x" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/runs HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/runs HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{",
    ],
    ids=["tls", "version", "url", "length", "torn"],
)
def test_what_is_hardly_http_harms_nobody(address: str, sent: bytes) -> None:
    host, _, port = address.partition(":")
    # A server that has not read all of it when it closes resets the connection.
    with suppress(ConnectionResetError, BrokenPipeError), socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    connection = HTTPConnection(address, timeout=30)
    connection.request("GET", "/readyz")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "reason"),
    [
        ("POST", "/v1/runs/none:pause", None, "RUN_UNKNOWN"),
        ("POST", "/v1/runs/none:resume", None, "RUN_UNKNOWN"),
        ("POST", "/v1/runs/none:stop", None, "RUN_UNKNOWN"),
        ("DELETE", "/v1/runs/none", None, "RUN_UNKNOWN"),
        ("PATCH", "/v1/runs/none", {"note": "x"}, "RUN_UNKNOWN"),
        ("GET", "/v1/targets/none", None, "TARGET_UNKNOWN"),
        ("DELETE", "/v1/targets/none", None, "TARGET_UNKNOWN"),
        ("POST", "/v1/targets/none:probe", None, "TARGET_UNKNOWN"),
        ("GET", "/v1/trainers/none", None, "TRAINER_UNKNOWN"),
        ("DELETE", "/v1/trainers/none", None, "TRAINER_UNKNOWN"),
        ("POST", "/v1/trainers/none:detach", None, "TRAINER_UNKNOWN"),
        ("POST", "/v1/trainers/none:attach", {"run": "demo"}, "TRAINER_UNKNOWN"),
        ("POST", "/v1/trainers/t1:attach", {"run": "none"}, "RUN_UNKNOWN"),
    ],
)
def test_unknown_ids(client: TestClient, desk: Desk, method: str, path: str, body: Any, reason: str) -> None:
    desk.trainer()
    refusal = assert_problem(client.request(method, path, json=body), 404, reason)
    assert "'none'" in refusal["detail"]
    assert "GET /v1/" in refusal["detail"], "and how to find what there is"
