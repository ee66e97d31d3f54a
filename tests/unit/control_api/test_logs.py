"""Logs of training processes: stored once, the newest kept, read by page, by tail and as a stream."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from control_api.store import logs
from tests.fakes.control_plane import Desk, assert_problem, report


def send(desk: Desk, work: int, first: int, *lines: str, trainer: str = "t1", state: str = "RUNNING") -> int:
    """One heartbeat with lines; the server's count."""
    answer = desk.beat(trainer, report(work, state, logs={"first_line": first, "lines": list(lines)}))
    return int(answer["acknowledged"]["next_log_line"])


def texts(desk: Desk, query: str = "") -> list[str]:
    """What is stored."""
    return [one["text"] for one in desk.get(f"runs/demo/logs{query}")["logs"]]


def test_stored_once_and_gaps_stay(desk: Desk) -> None:
    work = desk.running()
    assert send(desk, work, 0, "a", "b", "c") == 3
    assert send(desk, work, 0, "a", "b", "c") == 3, "a heartbeat whose answer was lost"
    assert send(desk, work, 2, "c", "d") == 4, "an overlap"
    assert send(desk, work, 9, "j") == 10, "an agent may skip old lines"
    assert send(desk, work, 5, "f") == 10, "and cannot bring them later"
    assert desk.beat("t1", report(work, "RUNNING"))["acknowledged"]["next_log_line"] == 10
    assert desk.beat()["assignment"]["next_log_line"] == 10, "where another process of the agent goes on"
    assert send(desk, work, 10) == 10
    stored = desk.get("runs/demo/logs")
    assert [(one["number"], one["text"]) for one in stored["logs"]] == [
        (0, "a"), (1, "b"), (2, "c"), (3, "d"), (9, "j")
    ]  # fmt: skip
    assert (stored["next_page_token"], {one["attempt"] for one in stored["logs"]}) == (None, {1})


def test_every_attempt_counts_for_itself(desk: Desk) -> None:
    work = desk.running()
    send(desk, work, 0, "first attempt")
    desk.verb("stop")
    assert send(desk, work, 1, "saved", state="STOPPED") == 2
    desk.verb("resume")
    desk.reconcile()
    again = desk.beat()["assignment"]
    assert (again["attempt"], again["next_log_line"]) == (2, 0)
    assert send(desk, again["id"], 0, "second attempt", state="STARTING") == 1
    assert send(desk, work, 2, "late", state="STOPPED") == 3, "an attempt that is over still has its lines stored"
    found = desk.get("runs/demo/logs")["logs"]
    assert [(one["attempt"], one["text"]) for one in found] == [
        (1, "first attempt"), (1, "saved"), (2, "second attempt"), (1, "late")
    ]  # fmt: skip


def test_the_newest_lines_of_each_run_are_kept(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "KEPT_LINES", 5)
    work = desk.running()
    other = desk.running("other", "t2")
    send(desk, other, 0, "x", "y", trainer="t2")
    for number in range(0, 12, 3):
        send(desk, work, number, *(str(number + one) for one in range(3)))
    assert texts(desk) == ["7", "8", "9", "10", "11"]
    assert [one["text"] for one in desk.get("runs/other/logs")["logs"]] == ["x", "y"]


def test_tail_and_pages(desk: Desk, client: TestClient) -> None:
    work = desk.running()
    send(desk, work, 0, *map(str, range(10)))
    assert texts(desk, "?tail=3") == ["7", "8", "9"]
    assert texts(desk, "?tail=0") == []
    assert texts(desk, "?tail=10000") == [str(one) for one in range(10)]
    found, token = [], ""
    for _ in range(4):
        query = {"tail": 5, "page_size": 2, "page_token": token}
        page = client.get("/v1/runs/demo/logs", params=query).json()
        found += [one["text"] for one in page["logs"]]
        if (token := page["next_page_token"]) is None:
            break
    assert found == ["5", "6", "7", "8", "9"]
    for tail in ("-1", "10001", "ten"):
        assert_problem(client.get(f"/v1/runs/demo/logs?tail={tail}"), 422, "REQUEST_INVALID")


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("a\x00b", "a␀b"),
        ("half \ud83d of a pair", "half \ufffd of a pair"),
        ("ends with half \udc00", "ends with half \ufffd"),
        ("whole 💩", "whole 💩"),
        ("tab\tstays, line\nbreaks\r\n do not", "tab\tstays, line␊breaks␍␊ do not"),
        ("\x7f\x9b", "␡\ufffd"),
        ("", ""),
        ("💩" * 2000, "💩" * 2000),
    ],
)
def test_any_character_is_stored(client: TestClient, desk: Desk, sent: str, stored: str) -> None:
    work = desk.running()
    body = {"instance_id": "t1-1", "report": report(work, "RUNNING", logs={"first_line": 0, "lines": [sent]})}
    # As escapes: half a character can be sent only so.
    response = client.post(
        "/v1/trainers/t1:heartbeat", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code == 200, response.text
    assert texts(desk) == [stored]


@pytest.mark.parametrize(
    ("batch", "location"),
    [
        ({"first_line": -1, "lines": []}, "body.report.logs.first_line"),
        ({"first_line": "0", "lines": []}, "body.report.logs.first_line"),
        ({"first_line": 2**53, "lines": ["x"]}, "body.report.logs.first_line"),
        ({"first_line": 0, "lines": ["x" * 2001]}, "body.report.logs.lines.0"),
        ({"first_line": 0, "lines": ["x"] * 201}, "body.report.logs.lines"),
        ({"first_line": 0, "lines": [7]}, "body.report.logs.lines.0"),
        ({"first_line": 0, "lines": "text"}, "body.report.logs.lines"),
        ({"first_line": 0, "lines": [None]}, "body.report.logs.lines.0"),
        ({"lines": ["x"]}, "body.report.logs.first_line"),
    ],
)
def test_another_shape_is_refused(client: TestClient, desk: Desk, batch: dict[str, Any], location: str) -> None:
    work = desk.running()
    body = {"instance_id": "t1-1", "report": report(work, "RUNNING", logs=batch)}
    refused = assert_problem(client.post("/v1/trainers/t1:heartbeat", json=body), 422, "REQUEST_INVALID")
    assert [one["location"] for one in refused["errors"]] == [location]


def test_they_go_with_their_run(client: TestClient, desk: Desk) -> None:
    work = desk.running()
    send(desk, work, 0, "x", state="SUCCEEDED")
    assert client.delete("/v1/runs/demo").status_code == 204
    assert_problem(client.get("/v1/runs/demo/logs"), 404, "RUN_UNKNOWN")
    assert desk.beat("t1", report(work, "SUCCEEDED"))["acknowledged"] is None
    desk.run()
    assert texts(desk) == []


@pytest.mark.parametrize("cursor", ["x", "1-2", "-1", "9" * 20])
def test_places_that_no_stream_gave(client: TestClient, desk: Desk, cursor: str) -> None:
    desk.target()
    desk.run()
    assert_problem(client.get("/v1/runs/demo/logs:stream", params={"cursor": cursor}), 422, "REQUEST_INVALID")
