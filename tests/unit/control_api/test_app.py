"""The application answers probes, and everything else that goes wrong as problem details."""

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from control_api.app import create_app
from control_api.problems import MEDIA_TYPE
from slipstream import __version__


@pytest.fixture
def app() -> FastAPI:
    """The application with two routes that fail in ways it has none for yet."""
    app = create_app()

    @app.get("/double/{number}")
    def double(number: int) -> int:
        return 2 * number

    @app.get("/defect")
    def defect() -> None:
        raise RuntimeError("the secret of the trace")

    return app


@pytest.fixture
def client(app: FastAPI) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


def assert_problem(response: Any, status: int) -> dict[str, Any]:
    """The response is a problem with this status; its body."""
    assert response.status_code == status
    assert response.headers["content-type"] == MEDIA_TYPE
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert {"type", "title", "detail"} <= set(body)
    return body


@pytest.mark.parametrize(("path", "status"), [("/healthz", "ok"), ("/readyz", "ready")])
def test_probes(client: TestClient, path: str, status: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.json() == {"status": status, "version": __version__}


def test_unknown_path(client: TestClient) -> None:
    body = assert_problem(client.get("/nowhere"), 404)
    assert body["title"] == "Not Found"
    assert "/nowhere" in body["detail"]


def test_wrong_method_names_the_right_one(client: TestClient) -> None:
    response = client.post("/healthz")
    body = assert_problem(response, 405)
    assert body["detail"] == "/healthz accepts GET, not POST."
    assert response.headers["allow"] == "GET"


def test_invalid_input_is_listed(client: TestClient) -> None:
    body = assert_problem(client.get("/double/three"), 422)
    assert [error["location"] for error in body["errors"]] == ["path.number"]
    assert "integer" in body["errors"][0]["detail"]


def test_a_defect_tells_nothing_of_the_inside(client: TestClient) -> None:
    response = client.get("/defect")
    assert_problem(response, 500)
    assert "secret" not in response.text


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic right", "right", "Bearer rightly"])
def test_token_is_asked_for(header: str | None) -> None:
    client = TestClient(create_app("right"))
    response = client.get("/openapi.json", headers={"Authorization": header} if header else {})
    assert_problem(response, 401)
    assert response.headers["www-authenticate"] == "Bearer"


def test_token_opens_everything_and_probes_need_none() -> None:
    client = TestClient(create_app("right"))
    assert client.get("/openapi.json", headers={"Authorization": "Bearer right"}).status_code == 200
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 200
    assert client.get("/nowhere").status_code == 401
