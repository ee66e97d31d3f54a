"""/v1/trainers and the reconciler: who works on what, and what becomes of a run."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.fakes.control_plane import Desk, assert_problem, checkpoint, record, registration, report

DIED = {"child": 1, "exit_code": -9, "reason": "INTERNAL", "message": "killed", "will_restart": True}
GAVE_UP = DIED | {"child": 4, "reason": "OUT_OF_MEMORY", "message": "full.", "remedy": "Less.", "will_restart": False}


def test_registered_read_listed(client: TestClient, desk: Desk) -> None:
    created = desk.trainer()
    assert (created["status"], created["run"]) == ("FREE", None)
    assert desk.get("trainers/t1") == created
    assert desk.get("trainers")["trainers"] == [created]
    assert desk.trainer() == created, "the same agent again"


def test_two_agents_with_one_name(client: TestClient, desk: Desk) -> None:
    desk.trainer()
    other = registration("t1", instance_id="another")
    assert_problem(client.post("/v1/trainers", json=other), 409, "NAME_TAKEN")
    assert_problem(client.post("/v1/trainers/t1:heartbeat", json={"instance_id": "another"}), 409, "NAME_TAKEN")
    desk.clock.forward(16)
    assert client.post("/v1/trainers", json=other).status_code == 201, "the first one is gone"
    assert_problem(client.post("/v1/trainers/t1:heartbeat", json={"instance_id": "t1-1"}), 409, "NAME_TAKEN")


@pytest.mark.parametrize("version", [0, 2])
def test_another_protocol_version(client: TestClient, version: int) -> None:
    response = client.post("/v1/trainers", json=registration("t1", protocol_version=version))
    body = assert_problem(response, 422, "PROTOCOL_MISMATCH")
    assert f"speaks protocol {version}, this server speaks 1" in body["detail"]


@pytest.mark.parametrize(
    ("change", "location"),
    [
        ({"devices": []}, "body.devices"),
        ({"devices": [{"kind": "tpu"}]}, "body.devices.0.kind"),
        ({"protocol_version": "1"}, "body.protocol_version"),
        ({"instance_id": ""}, "body.instance_id"),
        ({"storage": None}, "body.storage"),
        ({"rank": 0}, "body.rank"),
    ],
)
def test_registrations_are_checked(client: TestClient, change: dict[str, Any], location: str) -> None:
    response = client.post("/v1/trainers", json=registration("t1", **change))
    assert [one["location"] for one in assert_problem(response, 422)["errors"]] == [location]


@pytest.mark.parametrize(
    "change",
    [
        {"state": "DREAMING"},
        {"assignment": 0},
        {"assignment": 2**60},
        {"state": "FAILED"},
        {"metrics": {"first_index": -1, "records": []}},
        {"metrics": {"first_index": 0, "records": [{"step": 1}]}},
        {"metrics": {"first_index": 0, "records": [record(True)]}},
        {"metrics": {"first_index": 0, "records": [record(0)] * 201}},
        {"events": [{"id": "1", "type": "lower", "time": "2026-01-01T00:00:00Z"}]},
        {"events": [{"id": "1", "type": "UPPER", "time": "2026-01-01T00:00:00"}]},
        {"events": [{"id": "1", "type": "UPPER", "time": "0001-01-01T00:00:00+14:00"}]},
        {"checkpoints": [{"step": 1}]},
        {"exit": DIED | {"reason": "BAD_LUCK"}},
    ],
)
def test_reports_are_checked(client: TestClient, desk: Desk, change: dict[str, Any]) -> None:
    desk.trainer()
    body = {"instance_id": "t1-1", "report": report(1, "RUNNING") | change}
    assert assert_problem(client.post("/v1/trainers/t1:heartbeat", json=body), 422)["errors"]


def test_an_unknown_trainer_is_told_to_register(client: TestClient) -> None:
    assert_problem(client.post("/v1/trainers/t1:heartbeat", json={"instance_id": "x"}), 404, "TRAINER_UNKNOWN")


def test_from_pending_to_the_end(desk: Desk) -> None:
    desk.target()
    desk.run()
    desk.reconcile()
    assert desk.state() == "PENDING"
    assert desk.conditions() == {"NO_TRAINER_FREE"}
    desk.trainer()
    desk.reconcile()
    assert desk.state() == "STARTING"
    assert desk.conditions() == set()
    assignment = desk.beat()["assignment"]
    assert (assignment["run"], assignment["attempt"], assignment["desired_state"]) == ("demo", 1, "RUNNING")
    assert assignment["target"] == {"name": "local", "address": "127.0.0.1:1"}
    assert (assignment["spec"]["name"], assignment["spec"]["train"]["max_steps"]) == ("demo", 100)
    desk.beat("t1", report(assignment["id"], "STARTING"))
    assert desk.state() == "STARTING"
    progress = {"step": 25, "total_steps": 50}
    desk.beat("t1", report(assignment["id"], "RUNNING", progress=progress))
    run = desk.get("runs/demo")
    assert (run["state"], run["trainers"], run["progress"]["fraction"]) == ("RUNNING", ["t1"], 0.5)
    assert desk.get("trainers/t1")["status"] == "BUSY"
    answer = desk.beat("t1", report(assignment["id"], "SUCCEEDED"))
    assert answer["assignment"] is None
    run = desk.get("runs/demo")
    assert (run["state"], run["trainers"]) == ("SUCCEEDED", [])
    assert [one["state"] for one in run["history"]] == ["PENDING", "STARTING", "RUNNING", "SUCCEEDED"]
    assert desk.get("trainers/t1")["status"] == "FREE"


def test_pause_resume_stop_resume(desk: Desk) -> None:
    work = desk.running()
    desk.verb("pause")
    assert desk.beat("t1", report(work, "RUNNING"))["assignment"]["desired_state"] == "PAUSED"
    assert desk.state() == "PAUSING"
    assert desk.beat("t1", report(work, "PAUSED"))["assignment"]["id"] == work, "the trainer stays with the run"
    assert desk.state() == "PAUSED"
    desk.verb("resume")
    assert desk.beat("t1", report(work, "PAUSED"))["assignment"]["desired_state"] == "RUNNING"
    assert desk.state() == "STARTING"
    desk.beat("t1", report(work, "RUNNING"))
    assert desk.state() == "RUNNING"
    desk.verb("stop")
    assert desk.beat("t1", report(work, "RUNNING"))["assignment"]["desired_state"] == "STOPPED"
    assert desk.beat("t1", report(work, "STOPPED"))["assignment"] is None
    assert desk.state() == "STOPPED"
    desk.verb("resume")
    desk.reconcile()
    again = desk.beat()["assignment"]
    assert (again["attempt"], again["desired_state"], desk.state()) == (2, "RUNNING", "STARTING")


def test_resumed_while_it_was_pausing(desk: Desk) -> None:
    work = desk.running()
    desk.verb("pause")
    assert desk.verb("resume")["state"] == "RUNNING"
    assert desk.beat("t1", report(work, "PAUSED"))["assignment"]["desired_state"] == "RUNNING"
    assert desk.state() == "RUNNING"


def test_paused_before_any_trainer_was_found(desk: Desk) -> None:
    desk.target()
    desk.run()
    desk.verb("stop")
    desk.verb("resume")
    desk.verb("pause")
    desk.reconcile()
    assert desk.state() == "PAUSED"
    desk.verb("stop")
    desk.reconcile()
    assert desk.state() == "STOPPED"


def test_resumed_without_a_trainer_it_waits_in_pending(desk: Desk) -> None:
    desk.target()
    desk.run()
    desk.verb("stop")
    assert desk.verb("resume")["state"] == "STARTING"
    desk.reconcile()
    assert desk.state() == "PENDING"
    assert desk.conditions() == {"NO_TRAINER_FREE"}


def test_a_child_that_dies_is_told_once_and_restarted(desk: Desk) -> None:
    work = desk.running()
    for _ in range(2):
        desk.beat("t1", report(work, "STARTING", exit=DIED))
    desk.reconcile()
    assert desk.state() == "RUNNING"
    assert desk.conditions() == {"TRAINER_RESTARTING"}
    died = [one for one in desk.get("runs/demo/events")["events"] if one["type"] == "CHILD_DIED"]
    assert [(one["source"], one["message"], one["data"]["exit_code"]) for one in died] == [("t1", "killed", -9)]
    desk.beat("t1", report(work, "RUNNING", exit=DIED))
    desk.reconcile()
    assert desk.conditions() == set()
    desk.beat("t1", report(work, "STARTING", exit=DIED))
    desk.reconcile()
    assert desk.conditions() == set(), "it starts for another reason"


def test_where_it_starts_again_is_said(desk: Desk) -> None:
    work = desk.running()
    for made, where in (
        ([], "from the beginning: there is no checkpoint yet"),
        ([4, 8], "from the checkpoint of step 8"),
    ):
        desk.beat("t1", report(work, "RUNNING", checkpoints=[checkpoint(step) for step in made]))
        desk.beat("t1", report(work, "STARTING", exit=DIED | {"child": 1 + len(made)}))
        desk.reconcile()
        assert [one["message"] for one in desk.get("runs/demo")["conditions"]] == [f"t1 starts again {where}."]


def test_a_fatal_end_has_its_reason(desk: Desk) -> None:
    work = desk.running()
    desk.beat("t1", report(work, "STARTING", exit=DIED, target_unreachable=True))
    desk.reconcile()
    assert desk.conditions() == {"TRAINER_RESTARTING", "TARGET_UNREACHABLE"}
    assert desk.beat("t1", report(work, "FAILED", exit=GAVE_UP))["assignment"] is None
    desk.reconcile()
    run = desk.get("runs/demo")
    assert run["conditions"] == [], "what is over is not said any more"
    assert (run["state"], run["reason"], run["message"]) == ("FAILED", "OUT_OF_MEMORY", "full. Less.")
    assert desk.verb("resume")["reason"] is None


def test_no_trainer_for_a_target_that_is_away(desk: Desk) -> None:
    desk.target(status="UNREACHABLE")
    desk.trainer()
    desk.run()
    desk.reconcile()
    assert (desk.state(), desk.conditions()) == ("PENDING", {"TARGET_UNREACHABLE"})
    desk.target(status="REACHABLE")
    desk.reconcile()
    assert desk.state() == "STARTING"
    desk.target(status="UNREACHABLE")
    desk.reconcile()
    assert (desk.state(), desk.conditions()) == ("STARTING", {"TARGET_UNREACHABLE"})


def test_a_trainer_says_that_its_target_is_away(desk: Desk) -> None:
    work = desk.running()
    desk.beat("t1", report(work, "RUNNING", target_unreachable=True))
    desk.reconcile()
    assert (desk.state(), desk.conditions()) == ("RUNNING", {"TARGET_UNREACHABLE"})
    desk.verb("pause")
    desk.beat("t1", report(work, "PAUSED"))
    assert desk.state() == "PAUSED", "pause works while the target is down"


def test_runs_go_to_trainers_that_can_train_them(desk: Desk) -> None:
    desk.target()
    desk.trainer("cpu-only")
    desk.run("needs-gpu", train={"device": "cuda", "attention": "flex", "max_steps": 1})
    desk.reconcile()
    assert desk.conditions("needs-gpu") == {"NO_TRAINER_FITS"}
    desk.trainer("gpu5", devices=[{"kind": "cuda", "index": 5}])
    desk.reconcile()
    assert desk.get("runs/needs-gpu")["trainers"] == ["gpu5"] and desk.conditions("needs-gpu") == set()
    # One that fits is there, if busy: waiting helps.
    desk.run("second", train={"device": "cuda", "attention": "flex", "max_steps": 1})
    desk.reconcile()
    assert desk.conditions("second") == {"NO_TRAINER_FREE"}


def test_a_run_that_waits_for_nothing_says_so_when_it_is_created(desk: Desk, client: TestClient) -> None:
    desk.target(status="UNREACHABLE")
    desk.trainer("cpu-only")
    created = desk.run("needs-gpu", train={"device": "cuda", "attention": "flex", "max_steps": 1})
    [condition] = created["conditions"]
    assert (condition["type"], condition["message"]) == (
        "NO_TRAINER_FITS",
        "needs-gpu asks for cuda (train.device is 'cuda', train.attention is 'flex'); the trainers here offer cpu. "
        "Start a trainer on a machine with a GPU, or create the run with the settings train.device=cpu, "
        "train.attention=sdpa, train.precision=float32.",
    )
    desk.reconcile()
    assert desk.conditions("needs-gpu") == {"NO_TRAINER_FITS", "TARGET_UNREACHABLE"}
    response = client.post("/v1/trainers/cpu-only:attach", json={"run": "needs-gpu"})
    assert "asks for cuda" in assert_problem(response, 409, "TRAINER_UNSUITABLE")["detail"]
    desk.clock.forward(60)  # nothing is heard of it any more
    desk.reconcile()
    assert desk.conditions("needs-gpu") == {"TARGET_UNREACHABLE"}


def test_a_run_goes_on_only_where_its_checkpoints_are(desk: Desk, client: TestClient) -> None:
    work = desk.running()
    desk.beat("t1", report(work, "RUNNING", checkpoints=[checkpoint(10)]))
    desk.verb("stop")
    desk.beat("t1", report(work, "STOPPED"), leaving=True)
    desk.trainer("elsewhere", storage="disk-2")
    desk.verb("resume")
    desk.reconcile()
    assert (desk.state(), desk.conditions()) == ("PENDING", {"NO_TRAINER_FREE"})
    response = client.post("/v1/trainers/elsewhere:attach", json={"run": "demo"})
    assert "storage" in assert_problem(response, 409, "TRAINER_UNSUITABLE")["detail"]
    desk.trainer("beside", storage="disk-1")
    desk.reconcile()
    assert desk.get("runs/demo")["trainers"] == ["beside"]


def test_an_agent_that_leaves_gives_its_run_to_another(desk: Desk) -> None:
    work = desk.running()
    desk.beat("t1", report(work, "RUNNING"), leaving=True)
    assert desk.get("trainers/t1")["status"] == "LEAVING"
    desk.beat("t1", report(work, "STOPPED"), leaving=True)
    desk.reconcile()
    assert desk.state() == "PENDING"
    desk.trainer("t2")
    desk.reconcile()
    assert desk.get("runs/demo")["trainers"] == ["t2"]


def test_an_agent_that_said_goodbye_is_not_lost_and_its_name_is_free(client: TestClient, desk: Desk) -> None:
    work = desk.running()
    desk.beat("t1", report(work, "STOPPED"), leaving=True)
    for seconds in (0, 100):
        desk.clock.forward(seconds)
        assert desk.get("trainers/t1")["status"] == "STOPPED"
    body = assert_problem(client.post("/v1/trainers/t1:attach", json={"run": "demo"}), 409, "TRAINER_LOST")
    assert body["detail"].startswith("Trainer 't1' was stopped.")
    desk.trainer("t1", instance_id="another")
    assert desk.get("trainers/t1")["status"] == "FREE"
    desk.beat("t1", instance_id="another", leaving=True)
    assert client.delete("/v1/trainers/t1").status_code == 204


def test_an_agent_that_is_killed_while_it_leaves_is_lost(desk: Desk) -> None:
    work = desk.running()
    desk.beat("t1", report(work, "RUNNING"), leaving=True)
    desk.clock.forward(16)
    assert desk.get("trainers/t1")["status"] == "LOST"


def test_another_storage_under_the_same_name(client: TestClient, desk: Desk) -> None:
    desk.running()
    desk.trainer("t1", storage="disk-2")
    desk.reconcile()
    assert desk.beat()["assignment"]["attempt"] == 2


def test_oldest_run_first(desk: Desk) -> None:
    desk.target()
    for name in ("b", "a"):
        desk.run(name)
    desk.trainer()
    desk.reconcile()
    assert (desk.state("b"), desk.state("a")) == ("STARTING", "PENDING")


def test_only_a_lost_trainer_without_a_run_is_forgotten(client: TestClient, desk: Desk) -> None:
    work = desk.running()
    path = "/v1/trainers/t1"
    body = assert_problem(client.delete(path), 409, "TRAINER_BUSY")
    assert "holds run 'demo'" in body["detail"]
    desk.clock.forward(16)
    assert_problem(client.delete(path), 409, "TRAINER_BUSY")
    desk.beat("t1", report(work, "SUCCEEDED"))
    body = assert_problem(client.delete(path), 409, "TRAINER_BUSY")
    assert "heard of" in body["detail"]
    desk.clock.forward(16)
    assert client.delete(path).status_code == 204
    assert_problem(client.delete(path), 404, "TRAINER_UNKNOWN")
    assert_problem(client.get(path), 404, "TRAINER_UNKNOWN")
    assert desk.get("trainers")["trainers"] == []
    assert_problem(client.post(f"{path}:heartbeat", json={"instance_id": "t1-1"}), 404, "TRAINER_UNKNOWN")
    assert_problem(client.post(f"{path}:attach", json={"run": "demo"}), 404, "TRAINER_UNKNOWN")


def test_a_forgotten_trainer_gets_nothing_until_it_registers_again(client: TestClient, desk: Desk) -> None:
    work = desk.running()
    desk.verb("stop")
    desk.beat("t1", report(work, "STOPPED"))
    desk.clock.forward(16)
    assert client.delete("/v1/trainers/t1").status_code == 204
    desk.verb("resume")
    desk.reconcile()
    assert desk.state() == "PENDING"
    back = desk.trainer("t1", instance_id="another", storage="disk-2")
    assert back["registered_at"] == back["last_seen_at"], "a name that is free again"
    desk.reconcile()
    assignment = desk.beat("t1", instance_id="another")["assignment"]
    assert assignment["attempt"] == 2, "the log of the first attempt is not written to again"
