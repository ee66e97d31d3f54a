"""What a new run begins with is settled when it is created: a path of a checkpoint, or a commit of a hub."""

import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from control_api.settings import Settings
from tests.fakes.control_plane import SPEC, Desk, assert_problem, checkpoint, report
from tests.fakes.hub_cache import COMMIT, put_drafter_into_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def saved(desk: Desk) -> Desk:
    """Run demo has two checkpoints on disk-1, the older one is the best; its trainer is elsewhere."""
    listed = [checkpoint(20) | {"is_best": True}, checkpoint(40)]
    desk.beat(report=report(desk.running(), "RUNNING", checkpoints=listed))
    return desk


def create(desk: Desk, named: str, name: str = "next") -> Any:
    spec = SPEC | {"name": name, "drafter": {"init_from": named}}
    return desk.client.post("/v1/runs", json={"target": "local", "spec": spec})


@pytest.mark.parametrize(
    ("named", "step"),
    [("demo", 40), ("demo@latest", 40), ("demo@best", 20), ("demo@20", 20), ("demo@step-00000040", 40)],
)
def test_a_run_is_the_path_of_its_checkpoint(named: str, step: int, saved: Desk) -> None:
    response = create(saved, named)
    assert response.status_code == 201, response.text
    path = f"/runs/demo/step-{step}"
    assert response.json()["spec"]["drafter"]["init_from"] == path
    events = saved.get("runs/next/events")["events"]
    (found,) = [one for one in events if one["type"] == "FIRST_DRAFTER_FOUND"]
    assert found["message"] == f"drafter.init_from {named} is {path}"


def test_only_a_trainer_that_shares_the_storage_takes_it(saved: Desk) -> None:
    assert create(saved, "demo@best").status_code == 201
    saved.trainer("elsewhere", storage="disk-2")
    saved.reconcile()
    assert saved.state("next") == "PENDING"
    (waits,) = [one for one in saved.get("runs/next")["conditions"] if one["type"] == "NO_TRAINER_FREE"]
    why = "elsewhere does not share the storage that holds the checkpoints that next has, or begins with."
    assert why in waits["message"]
    saved.trainer("beside")
    saved.reconcile()
    assert saved.get("runs/next")["trainers"] == ["beside"]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("dmo@best", "there is neither a path of this name nor a run 'dmo'. Did you mean demo?"),
        ("@best", "nor a run ''"),
        ("demo@30", "run demo has no checkpoint of step 30, expected one of: 20, 40"),
        ("demo@bset", "run demo has no checkpoint of step bset, expected one of: 20, 40"),
    ],
)
def test_a_mistyped_run_is_refused(named: str, words: str, saved: Desk) -> None:
    detail = assert_problem(create(saved, named), 409, "CHECKPOINT_INVALID")["detail"]
    assert f"drafter.init_from is {named!r}" in detail and words in detail
    assert [one["name"] for one in saved.get("runs")["runs"]] == ["demo"]


def test_a_run_without_checkpoints(desk: Desk) -> None:
    desk.target()
    desk.run("fresh")
    for named in ("fresh", "fresh@best"):
        detail = assert_problem(create(desk, named), 409, "CHECKPOINT_INVALID")["detail"]
        assert "run fresh has no checkpoint yet" in detail


def test_the_best_one_of_a_run_that_ended_before_it_was_reported(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "step-00000020").mkdir()
    (tmp_path / "best").symlink_to("step-00000020")
    listed = [checkpoint(step) | {"path": str(tmp_path / f"step-{step:08d}")} for step in (20, 40)]
    desk.beat(report=report(desk.running(), "RUNNING", checkpoints=listed))
    assert create(desk, "demo@best").json()["spec"]["drafter"]["init_from"] == str(tmp_path / "step-00000020")


def test_a_best_one_that_is_not_reported_yet(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "step-00000060").mkdir()
    (tmp_path / "best").symlink_to("step-00000060")
    listed = [checkpoint(40) | {"path": str(tmp_path / "step-00000040")}]
    desk.beat(report=report(desk.running(), "RUNNING", checkpoints=listed))
    detail = assert_problem(create(desk, "demo@best"), 409, "CHECKPOINT_INVALID")["detail"]
    assert "run demo has no best checkpoint" in detail


def test_a_drafter_of_a_hub_is_kept_as_its_commit(desk: Desk, cache: Path) -> None:
    desk.target()
    put_drafter_into_cache(cache, "some/drafter", branch="v1")
    response = create(desk, "some/drafter@v1")
    assert response.json()["spec"]["drafter"]["init_from"] == f"some/drafter@{COMMIT}"
    assert create(desk, f"some/drafter@{COMMIT}", "again").status_code == 201
    assert "FIRST_DRAFTER_FOUND" not in {one["type"] for one in desk.get("runs/again/events")["events"]}


def test_one_that_the_hub_does_not_give_out_here(desk: Desk, cache: Path) -> None:
    desk.target()
    desk.trainer("here", host=socket.gethostname())
    detail = assert_problem(create(desk, "some/drafter"), 409, "CHECKPOINT_INVALID")["detail"]
    assert "there is no drafter 'some/drafter': it is no path here, and the hub's some/drafter is neither" in detail
    desk.trainer("elsewhere", host="another")  # which may be let in
    assert create(desk, "some/drafter").json()["spec"]["drafter"]["init_from"] == "some/drafter"


def test_a_relative_path_without_data_roots(desk: Desk) -> None:
    desk.target()
    assert_problem(create(desk, "./exported"), 422, "PATH_NOT_ALLOWED")


class TestWithDataRoots:
    """A relative path starts at the first of them."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> Settings:
        return Settings(data_roots=(tmp_path / "data",))

    def test_a_path_wins_where_it_exists(self, desk: Desk, tmp_path: Path, cache: Path) -> None:
        desk.target()
        put_drafter_into_cache(cache, "some/drafter")
        data = {"files": [str(tmp_path / "data" / "a.jsonl")], "pack_tokens": 128}

        def begins(named: str, name: str) -> Any:
            spec = SPEC | {"name": name, "data": data, "drafter": {"init_from": named}}
            response = desk.client.post("/v1/runs", json={"target": "local", "spec": spec})
            return response.json().get("spec", {}).get("drafter", {}).get("init_from", response.status_code)

        assert begins("some/drafter", "of-the-hub") == f"some/drafter@{COMMIT}"
        assert begins("exported", "no-run") == 409
        for made in ("exported", "some/drafter"):
            (tmp_path / "data" / made).mkdir(parents=True)
            assert begins(made, f"from-{made.replace('/', '-')}") == str(tmp_path / "data" / made)
        assert begins("../elsewhere", "outside") == 422
