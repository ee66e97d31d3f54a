"""A server for every transport, on a tiny target."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.run_spec.spec import TargetSpec
from slipstream.wire.transports import choose
from target_server.target_model import TargetModel
from tests.fakes.live_target import LiveTarget
from tests.fakes.served_model import data_spec_json, write_conversations, write_tiny_target
from tests.fakes.stream_harness import SHELF_BYTES, Harness


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    directory = write_tiny_target(tmp_path_factory.mktemp("model"))
    return TargetModel.load(TargetSpec(model=str(directory), dtype="float32"), device="cpu")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return data_spec_json(write_conversations(tmp_path_factory.mktemp("data") / "conversations.jsonl"))


@pytest.fixture(params=["grpc", "shm"])
def harness(
    request: pytest.FixtureRequest, target: TargetModel, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Harness]:
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setenv("SLIPSTREAM_SHM_DIR", str(memory))
    monkeypatch.setattr("slipstream.wire.transports.grpc.CHUNK_BYTES", 2**14)
    monkeypatch.setitem(choose.FLOORS_GIGABYTES_PER_SECOND, request.param, 0.0)  # of a busy machine, with such chunks
    server = LiveTarget(target, tmp_path / "ledger.sqlite", shm_dir=memory, shelf_bytes=SHELF_BYTES)
    harness = Harness(server, request.param, data)
    yield harness
    harness.close()
    assert [path.name for path in memory.iterdir()] == ["slipstream-host"], "no segment is left"
