"""What an operator says to a target over REST, to an admin service that listens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from target_server.lease_book import DeliveryState
from tests.fakes.admin_target import admin_target
from tests.fakes.control_plane import Desk, assert_problem, report
from tests.fakes.ledger_desk import LedgerDesk


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[LedgerDesk]:
    desk = LedgerDesk(tmp_path / "ledger.sqlite")
    yield desk
    desk.close()


@pytest.fixture
def target(ledger: LedgerDesk, desk: Desk) -> Iterator[None]:
    """A target server that answers, registered as `local`; the run `demo` is RUNNING on it."""
    with admin_target(ledger) as address:
        desk.post("/v1/targets", {"name": "local", "address": address}, status=201)
        desk.running()
        yield


def test_packs_are_held_back_and_given_again(target: None, desk: Desk, ledger: LedgerDesk) -> None:
    trainer = ledger.join("demo")
    held = desk.post("/v1/targets/local:pause", {"run": "demo"})
    assert held["packs_held_back"] is True and held["state"] == "RUNNING"
    assert ledger.ask(*trainer).state is DeliveryState.PAUSED
    desk.reconcile()
    (condition,) = desk.get("runs/demo")["conditions"]
    assert condition["type"] == "PACKS_HELD_BACK" and "`slipstream target resume local demo`" in condition["message"]
    assert desk.post("/v1/targets/local:pause", {"run": "demo"})["packs_held_back"] is True, "once more is the same"
    assert desk.post("/v1/targets/local:resume", {"run": "demo"})["packs_held_back"] is False
    assert ledger.get(*trainer) == [0]
    desk.reconcile()
    assert desk.conditions() == set()


def test_what_holds_is_what_the_target_says(target: None, desk: Desk, ledger: LedgerDesk) -> None:
    name = ledger.open("demo")
    ledger.control.pause(name)
    assert desk.get("runs/demo")["packs_held_back"] is None
    desk.services.prober.probe_all()
    assert desk.get("runs/demo")["packs_held_back"] is True
    ledger.control.resume(name)
    desk.services.prober.probe_all()
    assert desk.get("runs/demo")["packs_held_back"] is False


def test_what_held_is_not_said_of_a_run_that_nobody_holds(target: None, desk: Desk, ledger: LedgerDesk) -> None:
    ledger.open("demo")
    desk.post("/v1/targets/local:pause", {"run": "demo"})
    desk.services.prober.probe_all()
    desk.verb("stop")
    desk.beat("t1", report(desk.beat("t1")["assignment"]["id"], "STOPPED"))
    desk.reconcile()
    run = desk.get("runs/demo")
    assert (run["state"], run["trainers"], run["packs_held_back"]) == ("STOPPED", [], None)
    desk.services.prober.probe_all()
    assert desk.get("runs/demo")["packs_held_back"] is None
    desk.verb("resume")
    desk.reconcile()
    desk.services.prober.probe_all()
    assert desk.get("runs/demo")["packs_held_back"] is True, "the target has not forgotten it"


def test_the_same_request_counts_once(target: None, client: TestClient, desk: Desk, ledger: LedgerDesk) -> None:
    ledger.open("demo")
    key = {"Idempotency-Key": "one"}
    first = client.post("/v1/targets/local:pause", json={"run": "demo"}, headers=key)
    desk.post("/v1/targets/local:resume", {"run": "demo"})
    again = client.post("/v1/targets/local:pause", json={"run": "demo"}, headers=key)
    assert again.json() == first.json() and again.headers["Idempotency-Replayed"] == "true"
    assert not ledger.book.subscriptions["subscriptions/demo"].record.paused
    other = client.post("/v1/targets/local:drain", headers=key)
    assert_problem(other, 422, "IDEMPOTENCY_KEY_REUSED")


def test_a_target_is_drained(target: None, desk: Desk, ledger: LedgerDesk) -> None:
    trainer = ledger.join("demo")
    drained = desk.post("/v1/targets/local:drain")
    assert (drained["status"], ledger.ask(*trainer).state) == ("DRAINING", DeliveryState.DRAINING)
    assert "it computes nothing more" in drained["detail"]
    assert desk.post("/v1/targets/local:drain")["status"] == "DRAINING"
    desk.reconcile()
    assert desk.conditions() == {"TARGET_UNREACHABLE"}


def test_what_is_refused(target: None, client: TestClient, desk: Desk, ledger: LedgerDesk) -> None:
    def refused(path: str, run: str, status: int, reason: str) -> str:
        return str(assert_problem(client.post(f"/v1/targets/{path}", json={"run": run}), status, reason)["detail"])

    assert "has begun to read" in refused("local:pause", "demo", 409, "SUBSCRIPTION_UNKNOWN")
    refused("local:pause", "none", 404, "RUN_UNKNOWN")
    refused("none:resume", "demo", 404, "TARGET_UNKNOWN")
    assert_problem(client.post("/v1/targets/local:pause", json={}), 422, "REQUEST_INVALID")
    assert_problem(client.post("/v1/targets/none:drain"), 404, "TARGET_UNKNOWN")
    desk.post("/v1/targets", {"name": "away", "address": "127.0.0.1:1"}, status=201)
    assert "is on target 'local'" in refused("away:pause", "demo", 422, "REQUEST_INVALID")
    away = assert_problem(client.post("/v1/targets/away:drain"), 409, "TARGET_UNREACHABLE")
    assert "does not answer: whether the order was carried out is not known." in away["detail"]
    ledger.open("demo")
    with ledger.unwritable():
        assert "cannot write its ledger" in refused("local:pause", "demo", 409, "LEDGER_UNWRITABLE")
    desk.beat("t1", report(desk.beat("t1")["assignment"]["id"], "SUCCEEDED"))
    for path in ("local:pause", "local:resume"):
        assert "reads no packs any more" in refused(path, "demo", 409, "TRANSITION_ILLEGAL")
