"""The control API as a process: serves, says where, leaves when told, and forgets nothing when it is killed."""

import json
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.control_plane import SPEC, record, registration
from tests.fakes.processes import ADDRESS, ManagedProcess, Processes


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()


def start(processes: Processes, database: Path, listen: str = "127.0.0.1:0") -> tuple[ManagedProcess, str]:
    process = processes.start("control_api.cli", "--listen", listen, "--database", f"sqlite:///{database}")
    return process, process.wait_for_line(ADDRESS).group(1)


def call(address: str, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def stream(address: str, cursor: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(id, kind, data) of each message after `cursor`; ends when the server does."""
    connection = HTTPConnection(address, timeout=60)
    connection.request("GET", "/v1/runs/demo/events:stream", headers={"Last-Event-ID": cursor})
    fields: dict[str, str] = {}
    for raw in connection.getresponse():
        name, _, value = raw.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "data" in fields:
            yield fields["id"], fields["event"], json.loads(fields["data"])
            fields = {}
    connection.close()


def test_serves_until_sigterm(processes: Processes, tmp_path: Path) -> None:
    process, address = start(processes, tmp_path / "a.sqlite")
    assert call(address, "GET", "/healthz")["status"] == "ok"
    assert call(address, "GET", "/readyz")["status"] == "ready"
    call(address, "POST", "/v1/targets", {"name": "local", "address": "127.0.0.1:1"})
    call(address, "POST", "/v1/runs", {"target": "local", "spec": SPEC})
    messages = stream(address, "")
    assert next(messages)[1] == "event"
    process.terminate()
    assert all(kind == "event" for _, kind, _ in messages), "an open stream does not keep the process"
    assert process.wait_exit() == 0
    assert "Traceback" not in process.output


def test_killed_and_started_again(processes: Processes, tmp_path: Path) -> None:
    """An agent goes on as if nothing had been, and a watcher misses nothing."""
    process, address = start(processes, tmp_path / "a.sqlite")
    call(address, "POST", "/v1/targets", {"name": "local", "address": "127.0.0.1:1"})
    call(address, "POST", "/v1/runs", {"target": "local", "spec": SPEC})
    call(address, "POST", "/v1/trainers", registration("t1"))
    # No target answers here, so nobody is given the run but by hand.
    call(address, "POST", "/v1/trainers/t1:attach", {"run": "demo"})

    def beat(first: int, last: int) -> dict[str, Any]:
        metrics = {"first_index": first, "records": [record(step) for step in range(first, last)]}
        report = {"assignment": 1, "state": "RUNNING", "metrics": metrics}
        answer = call(address, "POST", "/v1/trainers/t1:heartbeat", {"instance_id": "t1-1", "report": report})
        assert isinstance(answer, dict)
        return answer

    assert beat(0, 10)["acknowledged"]["next_metric_index"] == 10
    steps, cursor = [], ""
    for message_id, kind, data in stream(address, ""):
        cursor = message_id
        steps += [data["step"]] if kind == "metric" else []
        if len(steps) == 4:
            break
    process.kill()
    _, again = start(processes, tmp_path / "a.sqlite", address)
    assert again == address
    answer = beat(8, 20)
    assert answer["acknowledged"]["next_metric_index"] == 20
    assert (answer["assignment"]["id"], answer["assignment"]["desired_state"]) == (1, "RUNNING")
    assert call(address, "GET", "/v1/runs/demo")["state"] == "RUNNING"
    for _, kind, data in stream(address, cursor):
        steps += [data["step"]] if kind == "metric" else []
        if len(steps) == 20:
            break
    assert steps == list(range(20))


def test_refuses_in_words(processes: Processes) -> None:
    process = processes.start("control_api.cli", "--listen", "0.0.0.0:0", env={"SLIPSTREAM_TOKEN": ""})
    assert process.wait_exit() == 2
    assert process.output.startswith("error: 0.0.0.0:0 is reachable from other machines")
    assert "remedy: Set SLIPSTREAM_TOKEN" in process.output
