"""What `slipstream plan` refuses is no run, as far as files and trainers tell; nor is one without its first drafter."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from control_api.settings import Settings
from tests.fakes.control_plane import SPEC, Desk, assert_problem

CONFIG = {
    "num_hidden_layers": 12,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What a plan needs of a target."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def create(desk: Desk, model: Path | str, **sections: Any) -> Any:
    spec = SPEC | {"target": {"model": str(model)}} | sections
    return desk.client.post("/v1/runs", json={"target": "local", "spec": spec})


def cpu(mebibytes: int | None) -> list[dict[str, Any]]:
    return [{"kind": "cpu", "memory_bytes": None if mebibytes is None else mebibytes * MIB}]


def gpu(gibibytes: int, **facts: Any) -> dict[str, Any]:
    return {"kind": "cuda", "name": "NVIDIA L4", "memory_bytes": gibibytes << 30} | facts


def test_a_run_that_fits_on_no_trainer_is_refused_with_what_would_fit(desk: Desk, model: Path) -> None:
    desk.target()
    desk.trainer("small", devices=cpu(420))
    desk.trainer("on-gpu", devices=[gpu(22, host_memory_bytes=400 * MIB)])
    body = assert_problem(create(desk, model), 409, "OUT_OF_MEMORY")
    assert "the CPU of trainer small has 420 MiB." in body["detail"]
    assert "Nearest settings that fit, with " in body["detail"] and "--set train.anchors_per_pack=" in body["detail"]
    assert desk.get("runs")["runs"] == []
    desk.trainer("large", devices=[gpu(22, host_memory_bytes=64_000 * MIB)])
    assert create(desk, model).status_code == 201, "it asks for the CPU, and gets that of a GPU's host"


@pytest.mark.parametrize("devices", [None, cpu(None), [*cpu(420), *cpu(None)], [gpu(1)]])
def test_where_memory_is_not_known_nothing_is_refused(desk: Desk, model: Path, devices: list[Any] | None) -> None:
    desk.target()
    if devices is not None:
        desk.trainer(devices=devices)
    assert create(desk, model).status_code == 201


def test_a_trainer_that_is_lost_counts_no_more(desk: Desk, model: Path) -> None:
    desk.target()
    desk.trainer("small", devices=cpu(420))
    desk.clock.forward(60)
    assert create(desk, model).status_code == 201


def test_nor_where_the_targets_sizes_are_not_known(desk: Desk, model: Path) -> None:
    desk.target()
    desk.trainer(devices=cpu(420))
    assert create(desk, "/nowhere/model").status_code == 201
    (model / "config.json").write_text("{}")
    assert create(desk, model, name="no-sizes").status_code == 201, "who loads it says what is wrong"


@pytest.mark.parametrize(
    ("drafter", "status", "reason", "words"),
    [
        ({"target_layer_ids": [1, 99]}, 409, "TARGET_INCOMPATIBLE", "99"),
        ({"num_attention_heads": 3}, 422, "SPEC_INVALID", "3 attention heads are no multiple of 2"),
    ],
)
def test_settings_that_the_target_cannot_have(
    desk: Desk, model: Path, drafter: dict[str, Any], status: int, reason: str, words: str
) -> None:
    desk.target()
    assert words in assert_problem(create(desk, model, drafter=drafter), status, reason)["detail"]


def test_a_request_that_was_answered_is_answered_again(desk: Desk, model: Path) -> None:
    desk.target()
    request = {"json": {"target": "local", "spec": SPEC | {"target": {"model": str(model)}}}}
    first = desk.client.post("/v1/runs", **request, headers={"Idempotency-Key": "k"})
    desk.trainer("small", devices=cpu(420))
    again = desk.client.post("/v1/runs", **request, headers={"Idempotency-Key": "k"})
    assert (first.status_code, again.status_code, again.json()) == (201, 201, first.json())


def test_a_first_drafter_is_looked_for_where_all_trainers_are_here(desk: Desk, tmp_path: Path) -> None:
    desk.target()
    desk.trainer("here", host=socket.gethostname())
    missing, empty = tmp_path / "gone", tmp_path / "empty"
    empty.mkdir()
    for named, words in ((missing, "no directory"), (empty, "a directory without a drafter")):
        response = create(desk, "some/model", drafter={"init_from": str(named)})
        detail = assert_problem(response, 409, "CHECKPOINT_INVALID")["detail"]
        assert f"drafter.init_from is {named}, which is {words}" in detail
    # It may have its first checkpoint before a trainer takes the new run.
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert create(desk, "some/model", drafter={"init_from": str(tmp_path / "run")}).status_code == 201
    desk.trainer("elsewhere", host="another")
    assert create(desk, "some/model", name="b", drafter={"init_from": str(missing)}).status_code == 201


@pytest.mark.parametrize("heldout", ["/" + "a" * 300, "/nowhere/answers.jsonl"])
def test_held_out_answers_that_are_not_to_be_had_here_are_the_trainers(desk: Desk, model: Path, heldout: str) -> None:
    desk.target()
    assert create(desk, model, eval={"heldout": heldout}).status_code == 201


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_another_user_s_trainer_may_read_is_not_refused(desk: Desk, model: Path, tmp_path: Path) -> None:
    desk.target()
    desk.trainer(host=socket.gethostname())
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    answers = hidden / "answers.jsonl"
    answers.touch(mode=0o000)
    named = {"drafter": {"init_from": str(hidden / "run")}, "eval": {"heldout": str(answers)}}
    (hidden / "run" / "checkpoints").mkdir(parents=True)
    (hidden / "run").chmod(0o000)
    assert create(desk, model, name="files", **named).status_code == 201
    hidden.chmod(0o000)
    assert create(desk, model, name="directories", **named).status_code == 201
    hidden.chmod(0o700)
    (hidden / "run").chmod(0o700)


class TestWithDataRoots:
    """Nobody finds out through a refusal what lies elsewhere."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> Settings:
        return Settings(data_roots=(tmp_path / "data",))

    def test_a_model_outside_is_not_looked_at(self, desk: Desk, model: Path, tmp_path: Path) -> None:
        desk.target()
        desk.trainer(devices=cpu(420))
        files = {"files": [str(tmp_path / "data" / "a.jsonl")], "pack_tokens": 128}
        assert create(desk, model, data=files).status_code == 201
