"""Runs of neighbouring tensors, recycled memory, and the choice of a transport."""

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import TargetClient
from slipstream.wire.codec import plan_layout
from slipstream.wire.transports import PayloadRef, choose_reader
from slipstream.wire.transports.base import BufferPool, contiguous_runs
from slipstream.wire.transports.choose import FLOORS_GIGABYTES_PER_SECOND, TransportName
from tests.fakes.payload_server import PayloadServer

PROBE = {"probe": torch.arange(2**20, dtype=torch.int32)}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PayloadServer]:
    monkeypatch.setenv("SLIPSTREAM_SHM_DIR", str(tmp_path))
    server = PayloadServer(tmp_path, num_slots=1, slot_bytes=2**22)
    yield server
    server.close()


@pytest.fixture
def client(server: PayloadServer) -> Iterator[TargetClient]:
    with TargetClient(server.address) as client:
        yield client


@pytest.mark.parametrize("requested", ["auto", "grpc", "shm"])
def test_choice_is_measured_and_logged(
    server: PayloadServer, client: TargetClient, requested: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reader = choose_reader(requested, server.target(server.put(0, PROBE)), client.channel)  # type: ignore[arg-type]
    assert reader.name == {"auto": "shm"}.get(requested, requested)
    assert reader.gigabytes_per_second is not None and reader.gigabytes_per_second > 0.01
    ref = PayloadRef.of_lease(server.put(0, {"x": torch.ones(5)}))
    assert torch.equal(reader.read(ref, ["x"])["x"], torch.ones(5))
    reader.close()
    assert [record.message for record in caplog.records] == ["transport_probe", "transport_chosen"]


def test_auto_takes_grpc_where_memory_is_not_shared_and_says_why(
    client: TargetClient,
    server: PayloadServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("SLIPSTREAM_SHM_DIR", str(elsewhere))
    assert choose_reader("auto", server.target(server.put(0, PROBE)), client.channel).name == "grpc"
    assert [record.message for record in caplog.records] == [
        "transport_not_used",
        "transport_probe",
        "transport_chosen",
    ]


def test_explicit_shared_memory_that_is_not_shared_is_an_error(
    client: TargetClient, server: PayloadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("SLIPSTREAM_SHM_DIR", str(elsewhere))
    with pytest.raises(SlipstreamError) as caught:
        choose_reader("shm", server.target(server.put(0, PROBE)), client.channel)
    assert caught.value.reason is Reason.TRANSPORT_UNAVAILABLE


@pytest.mark.parametrize("requested", ["grpc", "shm"])
def test_explicit_transport_below_its_floor_is_an_error(
    server: PayloadServer, client: TargetClient, requested: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FLOORS_GIGABYTES_PER_SECOND, requested, 1e6)
    with pytest.raises(SlipstreamError, match=f"Transport {requested} moves .* its floor is") as caught:
        choose_reader(requested, server.target(server.put(0, PROBE)), client.channel)  # type: ignore[arg-type]
    assert caught.value.reason is Reason.TRANSPORT_UNAVAILABLE


@pytest.mark.parametrize("requested", ["auto", "shm"])
def test_shared_memory_with_other_bytes_is_refused(
    server: PayloadServer, client: TargetClient, requested: TransportName
) -> None:
    target = server.target(server.put(0, PROBE))
    server.arena.slot(0)[5] ^= 1
    with pytest.raises(SlipstreamError, match="not what the server wrote") as caught:
        choose_reader(requested, target, client.channel)
    assert caught.value.reason is Reason.PAYLOAD_CORRUPT


def test_runs_join_neighbours_only() -> None:
    layout = plan_layout([(name, torch.uint8, (size,)) for name, size in [("a", 10), ("b", 64), ("c", 1), ("d", 5)]])
    manifest = batch_pb2.PackManifest(tensors=layout.specs, payload_size_bytes=layout.size_bytes)
    runs = contiguous_runs(manifest, ["d", "b", "a"])
    assert [(run.offset_bytes, run.size_bytes, [spec.name for spec in run.specs]) for run in runs] == [
        (0, 128, ["a", "b"]),
        (192, 5, ["d"]),
    ]


def test_buffer_returns_when_its_last_tensor_is_gone() -> None:
    pool = BufferPool()
    tensor = torch.from_numpy(pool.take(4096))
    address = tensor.data_ptr()
    part = tensor[100:200].view(10, 10)
    del tensor
    gc.collect()
    other = pool.take(4096)
    assert other.ctypes.data != address  # a part is still in use
    del part
    gc.collect()
    assert pool.take(4096).ctypes.data == address
    assert pool.take(8192).ctypes.data != address
