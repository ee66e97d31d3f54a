"""/v1/targets."""

import json

import pytest
from fastapi.testclient import TestClient

from tests.fakes.control_plane import Desk, assert_problem

LOCAL = {"name": "local", "address": "127.0.0.1:1"}


def test_registered_read_listed_forgotten(client: TestClient, desk: Desk) -> None:
    created = desk.post("/v1/targets", LOCAL, status=201)
    assert (created["name"], created["status"], created["model"]) == ("local", "UNKNOWN", None)
    assert desk.get("targets/local") == created
    assert desk.get("targets")["targets"] == [created]
    gone = client.delete("/v1/targets/local")
    assert (gone.status_code, gone.content) == (204, b"")
    assert_problem(client.get("/v1/targets/local"), 404, "TARGET_UNKNOWN")


def test_a_name_is_given_once(client: TestClient, desk: Desk) -> None:
    desk.post("/v1/targets", LOCAL, status=201)
    assert_problem(client.post("/v1/targets", json=LOCAL | {"address": "127.0.0.1:2"}), 409, "NAME_TAKEN")


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1", ":1", "http://127.0.0.1:1", "a b:1", ""])
def test_addresses_are_checked(client: TestClient, address: str) -> None:
    body = assert_problem(client.post("/v1/targets", json=LOCAL | {"address": address}), 422, "SPEC_INVALID")
    assert "HOST:PORT" in body["detail"]


@pytest.mark.parametrize(
    ("change", "location"),
    [
        ({"name": "Über"}, "body.name"),
        ({"name": "a/../b"}, "body.name"),
        ({"name": "a\n"}, "body.name"),
        ({"name": 7}, "body.name"),
        ({"address": None}, "body.address"),
        ({"colour": "red"}, "body.colour"),
        ({"\ud800": 1}, "body"),
    ],
)
def test_bodies_are_checked(client: TestClient, change: dict[str, object], location: str) -> None:
    # As escapes: half a character can be sent only so.
    content = json.dumps(LOCAL | change)
    response = client.post("/v1/targets", content=content, headers={"content-type": "application/json"})
    body = assert_problem(response, 422, "REQUEST_INVALID")
    assert [one["location"] for one in body["errors"]] == [location]


@pytest.mark.parametrize("name", ["%00", "%ff", "..%2f", "a%20b", "%F0%9F%92%A9", "x" * 5000, "'; DROP TABLE runs; --"])
@pytest.mark.parametrize("kind", ["targets", "runs", "trainers"])
def test_ids_with_strange_characters_are_unknown(client: TestClient, kind: str, name: str) -> None:
    for response in (client.get(f"/v1/{kind}/{name}"), client.post(f"/v1/{kind}/{name}:probe", json={})):
        body = response.json()
        assert response.status_code in (404, 405), body
        assert body["reason"] in ("NOT_FOUND", "METHOD_NOT_ALLOWED", f"{kind[:-1].upper()}_UNKNOWN")


def test_a_target_in_use_stays(client: TestClient, desk: Desk) -> None:
    desk.target()
    desk.run()
    body = assert_problem(client.delete("/v1/targets/local"), 409, "TARGET_IN_USE")
    assert "demo" in body["detail"]


def test_probing_a_target_that_is_away(client: TestClient, desk: Desk) -> None:
    desk.post("/v1/targets", LOCAL, status=201)
    probed = desk.post("/v1/targets/local:probe")
    assert probed["status"] == "UNREACHABLE"
    assert "127.0.0.1:1 does not answer" in probed["detail"]
    assert probed["checked_at"] is not None
    assert_problem(client.post("/v1/targets/other:probe"), 404, "TARGET_UNKNOWN")


def test_pages(client: TestClient, desk: Desk) -> None:
    for number in range(5):
        desk.post("/v1/targets", {"name": f"t{number}", "address": "127.0.0.1:1"}, status=201)
    names, token = [], ""
    for _ in range(4):
        page = client.get("/v1/targets", params={"page_size": 2, "page_token": token}).json()
        names += [one["name"] for one in page["targets"]]
        if (token := page["next_page_token"]) is None:
            break
    assert names == [f"t{number}" for number in range(5)]
