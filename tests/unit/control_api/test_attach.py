"""Attach and detach: a person decides who works on what."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.fakes.control_plane import Desk, assert_problem, report
from tests.fakes.plug_in import NAME, installed, write_plug_in


def test_a_second_trainer_for_a_second_run(desk: Desk, client: TestClient) -> None:
    work = desk.running()
    desk.trainer("t2")
    assert_problem(client.post("/v1/trainers/t2:attach", json={"run": "demo"}), 409, "RUN_HAS_TRAINER")
    desk.run("second")
    assert desk.post("/v1/trainers/t2:attach", {"run": "second"})["run"] == "second"
    assert desk.state("second") == "STARTING"
    assert_problem(client.post("/v1/trainers/t2:attach", json={"run": "demo"}), 409, "TRAINER_BUSY")
    assert desk.beat("t1", report(work, "RUNNING"))["assignment"]["id"] == work


def test_detached_and_attached_again(desk: Desk) -> None:
    work = desk.running()
    desk.post("/v1/trainers/t1:detach")
    assert desk.beat("t1", report(work, "RUNNING"))["assignment"]["desired_state"] == "STOPPED"
    assert desk.beat("t1", report(work, "STOPPED"))["assignment"] is None
    desk.reconcile()
    assert desk.state() == "PENDING", "it is not given back by itself"
    assert "was detached" in desk.get("runs/demo")["conditions"][0]["message"]
    desk.post("/v1/trainers/t1:attach", {"run": "demo"})
    assert desk.beat()["assignment"]["desired_state"] == "RUNNING"


def test_a_run_whose_plug_in_has_gone_waits_and_holds_nobody_up(desk: Desk, client: TestClient, tmp_path: Path) -> None:
    desk.target()
    with installed(write_plug_in(tmp_path)):
        desk.run("odd", drafter={"architecture": NAME})
    desk.trainer()
    desk.run()
    desk.reconcile()
    assert (desk.state("odd"), desk.state()) == ("PENDING", "STARTING")
    desk.trainer("t2")
    desk.reconcile()
    (condition,) = desk.get("runs/odd")["conditions"]
    assert "does not understand the definition of odd: drafter.architecture: 'last_feature'" in condition["message"]
    assert_problem(client.post("/v1/trainers/t2:attach", json={"run": "odd"}), 409, "TRAINER_UNSUITABLE")


def test_detached_from_a_paused_run_the_trainer_is_free(desk: Desk) -> None:
    work = desk.running()
    desk.verb("pause")
    desk.beat("t1", report(work, "PAUSED"))
    desk.post("/v1/trainers/t1:detach")
    desk.beat("t1", report(work, "STOPPED"))
    desk.reconcile()
    assert (desk.state(), desk.get("trainers/t1")["status"]) == ("PAUSED", "FREE")
    desk.verb("resume")
    desk.reconcile()
    assert desk.get("runs/demo")["trainers"] == ["t1"], "whoever resumes wants it to go on"


def test_detaching_a_trainer_that_is_lost(desk: Desk) -> None:
    desk.running()
    desk.post("/v1/trainers/t1:detach")
    desk.clock.forward(16)
    desk.reconcile()
    assert (desk.state(), desk.get("trainers/t1")["run"]) == ("PENDING", None)


@pytest.mark.parametrize(
    ("trainer", "run", "status", "reason"),
    [
        ("none", "demo", 404, "TRAINER_UNKNOWN"),
        ("t2", "none", 404, "RUN_UNKNOWN"),
        ("t2", "ended", 409, "TRANSITION_ILLEGAL"),
    ],
)
def test_attach_refused(client: TestClient, desk: Desk, trainer: str, run: str, status: int, reason: str) -> None:
    desk.running()
    desk.trainer("t2")
    desk.run("ended")
    desk.verb("stop", "ended")
    assert_problem(client.post(f"/v1/trainers/{trainer}:attach", json={"run": run}), status, reason)


def test_attaching_or_detaching_who_cannot_be(client: TestClient, desk: Desk) -> None:
    desk.target()
    desk.trainer()
    assert_problem(client.post("/v1/trainers/t1:detach"), 409, "TRAINER_IDLE")
    desk.clock.forward(16)
    desk.run()
    assert_problem(client.post("/v1/trainers/t1:attach", json={"run": "demo"}), 409, "TRAINER_LOST")
