"""The streams of a run, metrics and events, and logs: taken up again anywhere, nothing lost, nothing twice."""

import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from control_api.app import create_app
from control_api.settings import Settings
from control_api.store import events, logs, metrics, runs, targets, trainers
from control_api.store.database import Database
from control_api.store.tables import Trainer
from slipstream.run_spec.spec import RunSpec
from tests.fakes.control_plane import SPEC, record, registration
from tests.fakes.http_server import serving

COMPLETE_SPEC = RunSpec.model_validate(SPEC).model_dump(mode="json")


@pytest.fixture
def run_id(database: Database) -> int:
    with database.write() as session:
        target = targets.add(session, name="local", address="127.0.0.1:1", now=1.0)
        return runs.create(session, spec=COMPLETE_SPEC, target=target, note="", now=1.0).id


@pytest.fixture
def address(database: Database, run_id: int) -> Iterator[str]:
    # Long between passes: nothing but the test writes.
    settings = Settings(keep_alive_seconds=0.1, reconcile_seconds=60.0, probe_seconds=60.0, probe_deadline=0.1)
    with serving(create_app(database, settings, clock=lambda: 100.0)) as url:
        yield url.removeprefix("http://")


class Stream:
    """An open stream, read message by message."""

    def __init__(self, address: str, query: str = "", *, kind: str = "events", **headers: str) -> None:
        self._connection = HTTPConnection(address, timeout=30)
        self._connection.request("GET", f"/v1/runs/demo/{kind}:stream{query}", headers=headers)
        self.response = self._connection.getresponse()

    def next(self) -> dict[str, Any]:
        """The next message; `{}` at the end of the stream."""
        fields: dict[str, Any] = {}
        for raw in self.response:
            line = raw.decode().rstrip("\n")
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                fields[name] = value
            elif fields and not line:
                return fields | {"data": json.loads(fields["data"])}
        return {}

    def wait_for_comment(self, text: str) -> None:
        """Read on until the server has nothing else to say."""
        assert any(raw.decode().startswith(f": {text}") for raw in self.response), "the stream has ended"

    def close(self) -> None:
        self._connection.close()


def add_records(database: Database, run_id: int, first: int, last: int) -> None:
    with database.write() as session:
        batch = [record(step) for step in range(first, last)]
        metrics.append(session, run_id, "disk-1", first_index=first, records=batch)


def test_what_is_there_and_what_comes(database: Database, run_id: int, address: str) -> None:
    add_records(database, run_id, 0, 2)
    stream = Stream(address)
    assert stream.response.headers["content-type"].startswith("text/event-stream")
    seen = [stream.next() for _ in range(3)]
    while seen[-1]["event"] == "event":  # the conditions of a run that waits are events, too
        seen.append(stream.next())
    steps = [one["data"]["step"] for one in seen if one["event"] == "metric"]
    threading.Timer(0.05, add_records, (database, run_id, 2, 4)).start()
    while len(steps) < 4:
        message = stream.next()
        if message["event"] == "metric":
            steps.append(message["data"]["step"])
    assert steps == [0, 1, 2, 3]
    stream.close()


def test_taken_up_again_after_every_message(database: Database, run_id: int, address: str) -> None:
    add_records(database, run_id, 0, 5)
    with database.write() as session:
        events.append(session, run_id, events.NewEvent("LAST", "of all"), now=2.0)
    whole, cursor = [], "0-0"
    for number in range(40):
        # By header as a browser does, or by query as its first request must.
        stream = Stream(address, **{"Last-Event-ID": cursor}) if number % 2 else Stream(address, f"?cursor={cursor}")
        message = stream.next()
        stream.close()
        whole.append((message["event"], message["data"].get("step", message["data"].get("type"))))
        cursor = message["id"]
        if whole.count(("metric", 4)) and ("event", "LAST") in whole:
            break
    assert [step for kind, step in whole if kind == "metric"] == [0, 1, 2, 3, 4]
    assert len(set(whole)) == len(whole)


def test_more_than_one_batch(database: Database, run_id: int, address: str) -> None:
    add_records(database, run_id, 0, 950)
    stream = Stream(address)
    steps: list[int] = []
    while len(steps) < 950:
        message = stream.next()
        if message["event"] == "metric":
            steps.append(message["data"]["step"])
    assert steps == list(range(950))
    stream.close()


def test_an_idle_stream_is_kept_alive_and_ends_with_the_run(database: Database, run_id: int, address: str) -> None:
    stream = Stream(address)
    stream.wait_for_comment("nothing new")
    stream.wait_for_comment("nothing new")
    with database.write() as session:
        row = runs.find(session, "demo")
        assert row is not None
        runs.delete(session, row)
    while (message := stream.next())["event"] != "deleted":
        assert message["data"]["type"] == "CONDITION_CHANGED", "the run waits meanwhile"
    assert stream.next() == {}
    stream.close()


def test_the_cursor_of_a_run_is_now(database: Database, run_id: int, address: str) -> None:
    add_records(database, run_id, 0, 3)
    connection = HTTPConnection(address, timeout=10)
    connection.request("GET", "/v1/runs/demo")
    cursor = json.load(connection.getresponse())["event_cursor"]
    connection.close()
    add_records(database, run_id, 3, 4)
    stream = Stream(address, f"?cursor={cursor}")
    message = stream.next()
    while message["event"] != "metric":
        message = stream.next()
    assert message["data"]["step"] == 3
    stream.close()


def test_lines_of_the_log_as_they_come(database: Database, run_id: int, address: str) -> None:
    with database.write() as session:
        fields = registration("t1") | {"versions": {}, "registered_at": 1.0, "last_seen_at": 1.0}
        session.add(trainer := Trainer(**fields))
        run = runs.find(session, "demo")
        assert run is not None
        assignment = trainers.assign(session, run, trainer, now=1.0)
        logs.append(session, assignment, first_line=0, lines=[str(number) for number in range(450)])
    stream = Stream(address, kind="logs")
    seen = [stream.next() for _ in range(450)]
    assert {one["event"] for one in seen} == {"log"}
    assert [one["data"]["text"] for one in seen] == [str(number) for number in range(450)]
    assert stream.next() == {"event": "state", "id": seen[-1]["id"], "data": {"state": "PENDING"}}
    with database.write() as session:
        logs.append(session, session.merge(assignment), first_line=450, lines=["fresh"])
    assert stream.next()["data"] | {"id": 0} == {"id": 0, "attempt": 1, "number": 450, "text": "fresh"}
    stream.close()
    for query, headers, numbers in (
        ("?tail=2", {}, [449, 450]),
        (f"?cursor={seen[-2]['id']}", {}, [449, 450]),
        ("?tail=5", {"Last-Event-ID": seen[-1]["id"]}, [450]),
    ):
        stream = Stream(address, query, kind="logs", **headers)
        assert [stream.next()["data"]["number"] for _ in numbers] == numbers
        stream.close()
    stream = Stream(address, "?tail=0", kind="logs")
    assert stream.next()["event"] == "state"
    with database.write() as session:
        row = runs.find(session, "demo")
        assert row is not None
        runs.delete(session, row)
    assert stream.next()["event"] == "deleted"
    stream.close()
