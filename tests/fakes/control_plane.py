"""A person and trainer agents in front of a control API: requests in one line, and a clock to turn."""

import copy
from collections.abc import Callable
from typing import Any

from control_api.dependencies import Services
from control_api.problems import MEDIA_TYPE
from control_api.store import targets

SPEC: dict[str, Any] = {
    "name": "demo",
    "target": {"model": "some/model"},
    "data": {"files": ["/data/a.jsonl"], "pack_tokens": 128},
    "train": {"device": "cpu", "attention": "sdpa", "max_steps": 100},
}


class FakeClock:
    """Seconds since the epoch, as the test sets them."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.on_tick: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        """Let time pass, in steps that no control plane takes for an absence of its own."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 7.0, until)
            self.on_tick()

    def jump(self, seconds: float) -> None:
        """Time passes, or the clock is set, and nothing happens meanwhile."""
        self.now += seconds


def record(step: int, incarnation: int = 1) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "step": step,
        "incarnation": incarnation,
        "loss": 1.0 / (step + 1),
        "seconds": 0.5,
        "data_wait_seconds": 0.1,
        "tokens_per_second": 256.0,
        "eta_seconds": 10.0,
        "mean_matched_prefix": 0.5,
    }


def report(assignment: int, state: str, **more: Any) -> dict[str, Any]:
    """What a trainer says of its assignment."""
    return {"assignment": assignment, "state": state} | more


def checkpoint(step: int) -> dict[str, Any]:
    """A checkpoint as a trainer lists it."""
    return {"step": step, "incarnation": 1, "path": f"/runs/demo/step-{step}", "saved_at": "2026-01-01T00:00:00Z"}


class Desk:
    """Everything asserts that it was accepted, and returns the body."""

    def __init__(self, client: Any, services: Services, clock: FakeClock) -> None:
        self.client = client
        self.services = services
        self.clock = clock
        clock.on_tick = self.reconcile

    def target(self, name: str = "local", status: str = "REACHABLE") -> None:
        """A registered target that has been probed with this result."""
        with self.services.database.write() as session:
            row = targets.find(session, name)
            if row is None:
                row = targets.add(session, name=name, address="127.0.0.1:1", now=self.clock())
            row.status, row.detail = status, "" if status == "REACHABLE" else "away"

    def serves(self, model: str, revision: str | None, name: str = "local") -> None:
        """The target answers, and says which model it serves."""
        self.target(name)
        with self.services.database.write() as session:
            row = targets.find(session, name)
            assert row is not None
            row.model, row.revision = model, revision

    def run(self, name: str = "demo", **changes: Any) -> dict[str, Any]:
        """A new run."""
        spec = copy.deepcopy(SPEC) | {"name": name} | changes
        return self.post("/v1/runs", {"target": "local", "spec": spec}, status=201)

    def trainer(self, name: str = "t1", **changes: Any) -> dict[str, Any]:
        """A registered agent."""
        return self.post("/v1/trainers", registration(name, **changes), status=201)

    def beat(self, name: str = "t1", report: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        """One heartbeat."""
        return self.post(f"/v1/trainers/{name}:heartbeat", {"instance_id": f"{name}-1", "report": report} | changes)

    def reconcile(self) -> None:
        """One pass."""
        self.services.reconciler.reconcile()

    def verb(self, verb: str, run: str = "demo") -> dict[str, Any]:
        """pause, resume or stop."""
        return self.post(f"/v1/runs/{run}:{verb}")

    def get(self, path: str) -> dict[str, Any]:
        """Any path below /v1/."""
        response = self.client.get(f"/v1/{path}")
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def state(self, run: str = "demo") -> str:
        """Of the run."""
        return str(self.get(f"runs/{run}")["state"])

    def conditions(self, run: str = "demo") -> set[str]:
        """Of the run."""
        return {one["type"] for one in self.get(f"runs/{run}")["conditions"]}

    def post(self, path: str, body: Any = None, *, status: int = 200) -> dict[str, Any]:
        """A request that is accepted."""
        response = self.client.post(path, json=body) if body is not None else self.client.post(path)
        assert response.status_code == status, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def running(self, run: str = "demo", trainer: str = "t1") -> int:
        """A run that has trained its first step on a new trainer; the id of the assignment."""
        self.target()
        self.trainer(trainer)
        self.run(run)
        self.reconcile()
        assignment = self.beat(trainer)["assignment"]["id"]
        self.beat(trainer, {"assignment": assignment, "state": "RUNNING"})
        assert self.state(run) == "RUNNING"
        return int(assignment)


def registration(name: str, **changes: Any) -> dict[str, Any]:
    """Body of a registration."""
    return {
        "name": name,
        "instance_id": f"{name}-1",
        "protocol_version": 1,
        "host": "box",
        "storage": "disk-1",
        "devices": [{"kind": "cpu"}],
    } | changes


def assert_problem(response: Any, status: int, reason: str | None = None) -> dict[str, Any]:
    """The response is a problem with this status and reason; its body."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == MEDIA_TYPE
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert {"type", "title", "detail", "reason", "trace_id"} <= set(body)
    assert response.headers["x-trace-id"] == body["trace_id"]
    assert reason is None or body["reason"] == reason
    return body
