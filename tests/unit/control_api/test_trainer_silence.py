"""Trainers of which nothing is heard: when they count as lost, and what becomes of their runs."""

import pytest

from control_api.reconciler import Reconciler
from control_api.settings import Settings
from control_api.store.database import Database
from tests.fakes.control_plane import Desk, registration, report


def test_silence_then_the_same_trainer_again(desk: Desk) -> None:
    work = desk.running()
    desk.clock.forward(16)
    desk.reconcile()
    assert (desk.state(), desk.conditions()) == ("RUNNING", {"TRAINER_LOST"})
    assert desk.get("trainers/t1")["status"] == "LOST"
    assert desk.beat("t1")["assignment"]["id"] == work, "an agent that was started again finds its work"
    desk.reconcile()
    assert (desk.state(), desk.conditions()) == ("RUNNING", set())


def test_silence_then_another_trainer(desk: Desk) -> None:
    work = desk.running()
    desk.clock.forward(16)
    desk.trainer("t2")
    desk.reconcile()
    run = desk.get("runs/demo")
    assert (run["state"], run["trainers"]) == ("RUNNING", ["t2"])
    assert desk.beat("t1", report(work, "RUNNING"))["assignment"] is None, "the first one stops its child"


def test_silence_for_too_long(desk: Desk) -> None:
    desk.running()
    desk.clock.forward(299)
    desk.reconcile()
    assert desk.state() == "RUNNING"
    desk.clock.forward(2)
    desk.reconcile()
    run = desk.get("runs/demo")
    assert (run["state"], run["reason"], run["trainers"]) == ("FAILED", "TRAINERS_LOST", [])


def test_grace_begins_with_the_control_plane(desk: Desk, database: Database) -> None:
    desk.running()
    desk.clock.jump(10_000)
    reconciler = Reconciler(database, Settings(), desk.clock)
    reconciler.reconcile()
    assert (desk.state(), desk.conditions()) == ("RUNNING", set()), "it has listened for no second"
    desk.clock.on_tick = reconciler.reconcile
    desk.clock.forward(301)
    assert desk.state() == "FAILED"


@pytest.mark.parametrize("seconds", [10_000, -10_000], ids=["it stood still, or the clock was set", "set back"])
def test_time_in_which_nothing_could_be_heard_is_no_silence(desk: Desk, seconds: int) -> None:
    work = desk.running()
    desk.clock.jump(seconds)
    assert desk.get("trainers/t1")["status"] == "BUSY"
    desk.post("/v1/trainers", registration("t1", instance_id="another"), status=409)
    desk.reconcile()
    assert (desk.state(), desk.conditions()) == ("RUNNING", set())
    desk.clock.forward(10)
    desk.beat("t1", report(work, "RUNNING"))
    desk.clock.forward(10)
    assert desk.conditions() == set()
    desk.clock.forward(291)
    assert desk.state() == "FAILED", "silence is noticed as ever"


@pytest.mark.parametrize("settings", [Settings(trainer_timeout=1.0)])
def test_silence_is_noticed_with_a_timeout_no_longer_than_the_time_between_two_passes(desk: Desk) -> None:
    desk.trainer()
    for _ in range(2):
        desk.clock.jump(1.0)
        desk.reconcile()
    assert desk.get("trainers/t1")["status"] == "LOST"


def test_a_heartbeat_that_is_newer_than_the_time_of_the_pass(desk: Desk) -> None:
    work = desk.running()
    for _ in range(3):
        desk.clock.forward(10)
        desk.clock.jump(1)
        desk.beat("t1", report(work, "RUNNING"))
        desk.clock.jump(-1)
        desk.reconcile()
        assert desk.conditions() == set()


def test_a_paused_run_waits_for_ever(desk: Desk) -> None:
    work = desk.running()
    desk.verb("pause")
    desk.beat("t1", report(work, "PAUSED"))
    desk.clock.forward(1000)
    assert (desk.state(), desk.conditions()) == ("PAUSED", {"TRAINER_LOST"})
    desk.trainer("t2")
    desk.verb("resume")
    desk.reconcile()
    assert desk.get("runs/demo")["trainers"] == ["t2"]


@pytest.mark.parametrize(("verb", "state"), [("pause", "PAUSED"), ("stop", "STOPPED")])
def test_lost_while_it_should_save(desk: Desk, verb: str, state: str) -> None:
    desk.running()
    desk.verb(verb)
    desk.clock.forward(16)
    desk.reconcile()
    assert (desk.state(), desk.conditions()) == (state, {"ENDED_AT_LAST_CHECKPOINT"})
    desk.verb("resume")
    desk.reconcile()
    assert "ENDED_AT_LAST_CHECKPOINT" not in desk.conditions()
