"""Probes, tokens, and whatever goes wrong before a route is reached: always problem details."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from control_api.app import create_app
from control_api.settings import Settings
from control_api.store.database import Database
from slipstream import __version__
from tests.fakes.control_plane import Desk, FakeClock, assert_problem

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def with_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    unused = Database(f"sqlite:///{tmp_path_factory.mktemp('token')}/a.sqlite")
    yield TestClient(create_app(unused, Settings(token="right")), raise_server_exceptions=False)
    unused.close()


def test_alive(client: TestClient) -> None:
    response = client.get("/healthz")
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "version": __version__}


def test_ready_while_its_threads_run(client: TestClient) -> None:
    body = assert_problem(client.get("/readyz"), 503, "NOT_READY")
    assert "thread" in body["detail"]
    with client:
        assert client.get("/readyz").json() == {"status": "ready", "version": __version__}


def test_unknown_path(client: TestClient) -> None:
    body = assert_problem(client.get("/nowhere"), 404, "NOT_FOUND")
    assert "/nowhere" in body["detail"]


def test_wrong_method_names_the_right_one(client: TestClient) -> None:
    response = client.post("/healthz")
    body = assert_problem(response, 405, "METHOD_NOT_ALLOWED")
    assert body["detail"] == "/healthz accepts GET, not POST."
    assert response.headers["allow"] == "GET"


@pytest.mark.parametrize(
    ("method", "path", "detail"),
    [
        ("PUT", "/v1/runs/demo", "/v1/runs/demo accepts DELETE, GET, PATCH, not PUT."),
        ("OPTIONS", "/v1/runs", "/v1/runs accepts GET, POST, not OPTIONS."),
        ("POST", "/v1/runs/a:fly", "/v1/runs/a:fly is no verb; those of /v1/runs/a are :pause, :resume, :stop."),
        ("POST", "/v1/targets/local:fly", "those of /v1/targets/local are :drain, :pause, :probe, :resume."),
        ("POST", "/v1/trainers/t:fly", "those of /v1/trainers/t are :attach, :detach, :heartbeat."),
    ],
)
def test_what_a_path_accepts_is_said_in_full(client: TestClient, method: str, path: str, detail: str) -> None:
    response = client.request(method, path)
    assert detail in assert_problem(response, 405, "METHOD_NOT_ALLOWED")["detail"]
    assert method not in response.headers["allow"].split(", ")


@pytest.mark.parametrize(
    ("content", "location", "detail"),
    [
        ("{bad", "body", "This is no JSON: Expecting property name enclosed in double quotes, at character 1."),
        ("[]", "body", "Input should be a JSON object."),
        ('{"recipe": "x = 1", "spec": {}}', "body", "give either spec or recipe"),
    ],
)
def test_errors_of_a_body_are_in_the_senders_terms(
    client: TestClient, content: str, location: str, detail: str
) -> None:
    body = assert_problem(client.post("/v1/runs", content=content, headers=JSON), 422, "REQUEST_INVALID")
    assert body["errors"] == [{"location": location, "detail": detail}]


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://testserver:81"])
def test_an_older_browser_says_only_which_page_it_shows(client: TestClient, desk: Desk, origin: str) -> None:
    desk.target()
    desk.run()
    own = {"Host": "127.0.0.1:8080"}
    refused = client.post("/v1/runs/demo:stop", headers=own | {"Origin": origin})
    assert "another site" in assert_problem(refused, 403, "ACCESS_DENIED")["detail"]
    assert desk.state() == "PENDING"
    assert client.post("/v1/runs/demo:stop", headers=own | {"Origin": "http://127.0.0.1:8080"}).status_code == 200


def test_a_defect_tells_nothing_of_the_inside(database: Database) -> None:
    app = create_app(database, Settings())

    @app.get("/defect")
    def defect() -> None:
        raise RuntimeError("the secret of the trace")

    response = TestClient(app, "http://localhost", raise_server_exceptions=False).get("/defect")
    body = assert_problem(response, 500, "INTERNAL")
    assert "secret" not in response.text
    assert body["trace_id"] in body["detail"]


def test_the_callers_trace_is_kept(client: TestClient) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    response = client.get("/nowhere", headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    assert assert_problem(response, 404)["trace_id"] == trace


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic right", "right", "Bearer rightly", "Bearer r\xe9ght"])
def test_token_is_asked_for(with_token: TestClient, header: str | None) -> None:
    headers = {"Authorization": header.encode("latin-1")} if header else {}
    response = with_token.get("/v1/runs", headers=headers)
    assert_problem(response, 401, "ACCESS_DENIED")
    assert response.headers["www-authenticate"] == "Bearer"


def test_token_opens_everything_and_probes_need_none(with_token: TestClient) -> None:
    assert with_token.get("/openapi.json", headers={"Authorization": "Bearer right"}).status_code == 200
    assert with_token.get("/healthz").status_code == 200
    assert with_token.get("/readyz").status_code == 503
    assert with_token.get("/nowhere").status_code == 401


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_moves_no_run(client: TestClient, desk: Desk, site: str) -> None:
    desk.target()
    desk.run()
    refused = client.post("/v1/runs/demo:stop", headers={"Sec-Fetch-Site": site})
    assert "another site" in assert_problem(refused, 403, "ACCESS_DENIED")["detail"]
    assert desk.state() == "PENDING"
    assert client.get("/v1/runs/demo", headers={"Sec-Fetch-Site": site}).status_code == 200, "links may lead here"
    assert client.post("/v1/runs/demo:stop", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("127.0.0.1", "localhost:8080", "LOCALHOST", "[::1]:8080", "[::1]", "127.1.2.3:1")),
        *((host, 403) for host in ("rebound.example:8080", "127.0.0.1.example", "10.0.0.1:8080", ":8080", "[", "::")),
    ],
)
def test_without_a_token_only_loopback_names_are_answered_to(client: TestClient, host: str, status: int) -> None:
    response = client.get("/v1/runs", headers={"Host": host})
    assert response.status_code == status
    if status == 403:
        assert "start it with a token" in assert_problem(response, 403, "ACCESS_DENIED")["detail"]


def test_with_a_token_any_name_is_answered_to(with_token: TestClient) -> None:
    headers = {"Authorization": "Bearer right", "Host": "box.example"}
    assert with_token.get("/v1/runs", headers=headers).status_code == 200


def test_a_body_that_says_it_is_100_megabytes_is_not_kept(client: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 2**20

    response = client.post("/v1/runs", content=chunks(), headers=JSON | {"content-length": str(100 * 2**20)})
    body = assert_problem(response, 413, "BODY_TOO_LARGE")
    assert "1048576 bytes" in body["detail"]


def test_a_body_that_does_not_say_how_long_it_is_is_counted(client: TestClient) -> None:
    response = client.post("/v1/runs", content=iter([b"[" * 2**19] * 3), headers=JSON)
    assert_problem(response, 413, "BODY_TOO_LARGE")


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_bodies_are_json(client: TestClient, kind: str | None) -> None:
    response = client.post("/v1/targets", content=b"{}", headers={"content-type": kind} if kind else {})
    assert_problem(response, 415, "MEDIA_TYPE_UNSUPPORTED")


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"", 422), (b"{", 422), (b"[]", 422), (b"7", 422), (b"null", 422), (b"\xff", 400), (b"[" * 100_000, 400)],
)  # fmt: skip
def test_bodies_that_are_no_object(client: TestClient, content: bytes, status: int) -> None:
    assert_problem(client.post("/v1/targets", content=content, headers=JSON), status, "REQUEST_INVALID")


@pytest.mark.parametrize(
    ("query", "location"),
    [
        ("page_size=0", "query.page_size"),
        ("page_size=1001", "query.page_size"),
        ("page_size=ten", "query.page_size"),
        ("state=SLEEPING", "query.state"),
    ],
)
def test_queries_are_checked(client: TestClient, query: str, location: str) -> None:
    body = assert_problem(client.get(f"/v1/runs?{query}"), 422, "REQUEST_INVALID")
    assert [one["location"] for one in body["errors"]] == [location]


@pytest.mark.parametrize(
    "token", ["x", "YWZ0ZXI6eA==", "YWZ0ZXI6LTE=", "é", "====", "YWZ0ZXI6OTk5OTk5OTk5OTk5OTk5OTk5OTk="]
)
def test_page_tokens_that_we_never_gave(client: TestClient, token: str) -> None:
    assert_problem(client.get("/v1/runs", params={"page_token": token}), 422, "REQUEST_INVALID")


def test_the_document_shows_refusals_as_what_they_are(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    responses = document["paths"]["/v1/runs"]["post"]["responses"]
    assert set(responses["422"]["content"]) == {"application/problem+json"}
    assert set(responses["201"]["content"]) == {"application/json"}
    assert json.dumps(document).count("HTTPValidationError") == 0


def test_a_locked_database_is_said_so_and_waited_out(client: TestClient, database: Database, tmp_path: Path) -> None:
    other = Database(f"sqlite:///{database.path}")
    target = {"name": "local", "address": "127.0.0.1:1"}
    with other.write():
        response = client.post("/v1/targets", json=target)
        body = assert_problem(response, 503, "DATABASE_LOCKED")
        assert response.headers["retry-after"] == "2"
        assert str(database.path) in body["detail"]
        assert client.get("/v1/targets").status_code == 200, "reading goes on"
    assert client.post("/v1/targets", json=target).status_code == 201
    other.close()


def test_clock_is_the_servers(client: TestClient, clock: FakeClock) -> None:
    created = client.post("/v1/targets", json={"name": "local", "address": "127.0.0.1:1"}).json()["created_at"]
    assert created == "2027-01-15T08:00:00.000+00:00"


def test_no_page_of_it_loads_scripts_from_elsewhere(client: TestClient) -> None:
    assert [client.get(path).status_code for path in ("/docs", "/redoc")] == [404, 404]
