"""What the trainer agent sends is what the control API takes, and the other way round; neither imports the other."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from control_api import trainer_schemas as api
from drafter_trainer.agent.assignment import Assignment
from drafter_trainer.agent.devices import TrainerDevice
from drafter_trainer.agent.identity import PROTOCOL_VERSION, Identity
from drafter_trainer.agent.reports import Reporter, Standing, exit_report
from drafter_trainer.agent.restarts import Failure
from drafter_trainer.agent.run_files import MAX_LINES, RunFiles
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.states import DesiredState
from slipstream.wire.data_report import MAX_EXAMPLES, Finding, ReportBuilder
from tests.fakes.control_plane import SPEC, record

ASSIGNMENT = api.Assignment(
    id=17,
    run="demo",
    run_uid="5a",
    attempt=1,
    desired_state=DesiredState.RUNNING,
    directory="demo",
    spec=SPEC,
    target=api.AssignedTarget(name="local", address="127.0.0.1:1"),
    next_metric_index=0,
    next_log_line=0,
)
BROKEN = b'\xff{"step": NaN}\n\x00\n[[[[\n{"step": 1, "incarnation": 1, "loss": 1e999}\n\xed\xa0\x80\n'
GARBAGE = {
    "none": b"",
    "broken": BROKEN,
    "random": random.Random(0).randbytes(2**19),
    "control": b"\x01" * 2**19,
    "short": b"\xff\n" * 999,
    "deep": b"[" * 2**18,
}


def worst_data() -> dict[str, Any]:
    """Every finding, with examples of the longest names."""
    found = ReportBuilder()
    for finding in Finding:
        for number in range(MAX_EXAMPLES + 1):
            found.drop(finding, f"{'n' * 4096}.jsonl:{number}")
    return found.build("train").account()


def test_versions_and_limits_agree() -> None:
    assert PROTOCOL_VERSION == api.TRAINER_PROTOCOL_VERSION
    assert MAX_LINES == api.MAX_METRICS_PER_HEARTBEAT == api.MAX_LOG_LINES_PER_HEARTBEAT


def test_the_agent_reads_an_assignment() -> None:
    read = Assignment.from_answer(ASSIGNMENT.model_dump(mode="json"))
    assert (read.id, read.directory, read.target, read.desired_state) == (17, "demo", "127.0.0.1:1", "RUNNING")


@pytest.mark.parametrize(
    "device",
    [
        TrainerDevice("cpu", memory_bytes=10**10),
        TrainerDevice("cuda", 5, "x" * 999, 10**11),
        TrainerDevice("cuda", 0, "NVIDIA H200", 10**11, (9, 0), 10**12),
    ],
)
def test_registrations(device: TrainerDevice) -> None:
    body = json.loads(json.dumps(Identity("t1", "5f0c", "9a31").registration(device)))
    [read] = api.TrainerRegister.model_validate(body).devices
    assert (read.kind, read.index, read.memory_bytes) == (device.kind, device.index, device.memory_bytes)
    assert read.compute_capability == (device.compute_capability and list(device.compute_capability))
    assert read.host_memory_bytes == device.host_memory_bytes


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_heartbeats_whatever_lies_in_the_files(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "logs").mkdir()
    lines = b"".join(json.dumps(record(step)).encode() + b"\n" for step in range(3))
    for file in ("metrics.jsonl", "logs/attempt-0001.log"):
        (tmp_path / file).write_bytes(garbage + b"\n" + lines + garbage)
    for step in (5, 10):
        directory = tmp_path / "checkpoints" / f"step-{step:08d}"
        directory.mkdir(parents=True)
        (directory / "state.json").write_text(json.dumps({"incarnation": 1, "cursor": {"next_step": step}}))
        (directory / "manifest.json").write_bytes(garbage)
    files = RunFiles(tmp_path, attempt=1)
    reporter = Reporter(Assignment.from_answer(ASSIGNMENT.model_dump(mode="json")), files)
    reporter.add_event("CHILD_STARTED", "\udcff\0" * 9999, {"child": 1, "pid": 2})
    failure = Failure(Reason.INTERNAL, "\udcff\0\n" * 9999, "x" * 9999, -9)
    ended = exit_report(failure, child=1, log_tail=files.log_tail(), will_restart=False)
    report = reporter.build(
        Standing("FAILED", total_steps=9, target_unreachable=True, transport="shm", data=worst_data(), exit=ended)
    )
    body = json.dumps({"instance_id": "5f0c", "leaving": False, "report": report}, ensure_ascii=False).encode()
    assert len(body) < 2**20
    read = api.HeartbeatReport.model_validate_json(body)
    assert read.report is not None and read.report.checkpoints is not None and len(read.report.checkpoints) == 2
    assert api.HeartbeatReport.model_validate({"instance_id": "5f0c", "leaving": True, "report": None})
