"""Exports by REST: real processes where the checkpoint can be reached, refusals in words where not."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_api import exporter
from control_api.dependencies import Services
from control_api.exporter import Exporter, ExportRequest
from control_api.settings import Settings
from tests.fakes.control_plane import Desk, report
from tests.fakes.exports import drawn_weights, exportable_config, write_checkpoint
from tests.fakes.tiny_run import write_tiny_run

PATH = "/v1/runs/demo/checkpoints/12:export"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(export_root=tmp_path / "exports")


def listed(desk: Desk, path: Path, step: int = 12) -> None:
    """A run with one checkpoint."""
    assignment = desk.running()
    checkpoint = {"step": step, "incarnation": 1, "path": str(path), "saved_at": "2026-01-01T00:00:00Z"}
    desk.beat(report=report(assignment, "RUNNING", checkpoints=[checkpoint]))


def ended(desk: Desk, services: Services, number: int) -> dict[str, Any]:
    """The export, once its process has ended; it tells of every change."""
    changed = threading.Condition()
    change = services.exporter._change

    def tell(export: Any) -> None:
        with changed:
            change(export)
            changed.notify_all()

    services.exporter._change = tell  # type: ignore[method-assign]
    services.exporter.start()

    def found() -> dict[str, Any]:
        exports: list[dict[str, Any]] = desk.client.get("/v1/runs/demo/exports").json()["exports"]
        return next(one for one in exports if one["id"] == number)

    with changed:
        assert changed.wait_for(lambda: found()["ended_at"] is not None, timeout=160)
    services.exporter.stop()
    return found()


# A process that imports torch, on a machine that does other things as well.
@pytest.mark.timeout(180)
def test_an_export_is_made_and_listed(desk: Desk, services: Services, tmp_path: Path) -> None:
    config = exportable_config()
    checkpoint = write_checkpoint(write_tiny_run(tmp_path), tmp_path / "run", config, drawn_weights(config))
    listed(desk, checkpoint)
    answer = desk.client.post(PATH, json={"to": "vllm", "without_self_test": True, "dtype": "bfloat16"})
    assert answer.status_code == 202, answer.text
    assert answer.json()["state"] == "QUEUED" and answer.json()["step"] == 12
    export = ended(desk, services, answer.json()["id"])
    assert export["state"] == "SUCCEEDED", export
    assert export["output"] == str(tmp_path / "exports" / "demo-step-12-vllm")
    assert (tmp_path / "exports" / "demo-step-12-vllm" / "config.json").is_file()


@pytest.mark.timeout(180)
def test_what_an_export_says_when_it_fails(desk: Desk, services: Services, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    listed(desk, tmp_path / "empty")
    export = ended(desk, services, desk.client.post(PATH, json={"to": "zlab"}).json()["id"])
    assert export["state"] == "FAILED"
    assert any("holds no checkpoint" in line for line in export["lines"])


def test_a_checkpoint_that_cannot_be_reached(desk: Desk) -> None:
    listed(desk, Path("/elsewhere/step-12"))
    answer = desk.client.post(PATH, json={"to": "sglang"})
    assert (answer.status_code, answer.json()["reason"]) == (409, "CHECKPOINT_INVALID")
    assert "lies at /elsewhere/step-12 on the trainer's machine" in answer.json()["detail"]
    assert "slipstream checkpoint export /elsewhere/step-12 --to sglang" in answer.json()["detail"]


def test_what_is_not_there(desk: Desk) -> None:
    listed(desk, Path("/elsewhere/step-12"))
    answer = desk.client.post("/v1/runs/demo/checkpoints/13:export", json={"to": "sglang"})
    assert (answer.status_code, answer.json()["reason"]) == (404, "NOT_FOUND")
    assert desk.client.post("/v1/runs/nobody/checkpoints/13:export", json={"to": "sglang"}).status_code == 404
    assert desk.client.get("/v1/runs/nobody/exports").status_code == 404
    assert desk.client.post(PATH, json={"to": "onnx"}).status_code == 422
    assert desk.client.post(PATH, json={"to": "vllm", "output": "/etc"}).status_code == 422


class TestWithoutARoot:
    @pytest.fixture
    def settings(self) -> Settings:
        return Settings()

    def test_is_refused(self, desk: Desk, tmp_path: Path) -> None:
        listed(desk, tmp_path)
        answer = desk.client.post(PATH, json={"to": "vllm"})
        assert (answer.status_code, answer.json()["reason"]) == (422, "PATH_NOT_ALLOWED")
        assert "--export-root" in answer.json()["detail"]


def test_what_waits_is_never_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "_KEPT_EXPORTS", 2)
    waiting = Exporter(tmp_path / "exports", clock=lambda: 0.0)
    for step in range(4):
        waiting.request(ExportRequest("demo", step, tmp_path, "vllm", ()))
    assert [one.request.step for one in waiting.of_run("demo", after=0, size=9)] == [0, 1, 2, 3]
    for one in waiting.of_run("demo", after=0, size=2):
        waiting._change(replace(one, state="FAILED", ended_at=1.0))
    waiting.request(ExportRequest("demo", 4, tmp_path, "vllm", ()))
    assert [one.request.step for one in waiting.of_run("demo", after=0, size=9)] == [2, 3, 4]
