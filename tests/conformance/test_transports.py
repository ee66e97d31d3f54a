"""What every transport must do, with a real arena and a real gRPC server.

Of a payload a reader returns the leased bytes or an error, whatever happens to slot, server or other readers meanwhile.
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.run_spec.reasons import Reason
from slipstream.wire.arena import remove_stale_segments
from slipstream.wire.channel import TargetClient
from slipstream.wire.transports import GrpcReader, PayloadReader, PayloadRef, SharedMemoryReader
from tests.fakes.payload_server import PayloadServer, start_payload_server

MEBIBYTE = 2**20
KILLED_READER = """
import sys
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.wire.channel import TargetClient
from slipstream.wire.transports import GrpcReader, PayloadRef, SharedMemoryReader
name, address, host_id, lease = sys.argv[1:]
reader = SharedMemoryReader(host_id) if name == "shm" else GrpcReader(TargetClient(address).channel)
ref = PayloadRef.of_lease(batch_pb2.Lease.FromString(bytes.fromhex(lease)))
while True:
    reader.read(ref, ["x"])
    print("read", flush=True)
"""


class Harness:
    """One transport, the server, and how to act in the middle of a read."""

    def __init__(self, transport: str, server: PayloadServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.transport = transport
        self.server = server
        self._monkeypatch = monkeypatch
        self._clients: list[TargetClient] = []
        self._readers: list[PayloadReader] = []

    def reader(self) -> PayloadReader:
        reader: PayloadReader
        if self.transport == "shm":
            reader = SharedMemoryReader(self.server.host_id)
        else:
            self._clients.append(TargetClient(self.server.address))
            reader = GrpcReader(self._clients[-1].channel)
        self._readers.append(reader)
        return reader

    def in_the_middle_of_a_read(self, act: Callable[[], object]) -> None:
        """Call `act` once, when a part of the payload has been copied and a part has not."""
        if self.transport == "grpc":
            self.server.on_chunk = lambda chunk: act() if chunk == 2 else None
            return
        self.in_the_middle_of_a_copy(act)

    def in_the_middle_of_a_copy(self, act: Callable[[], object]) -> None:
        """As before, of a reader of shared memory, whoever serves it."""
        copy = np.copyto

        def slow_copy(destination: Any, source: Any) -> None:
            half = len(source) // 2
            copy(destination[:half], source[:half])
            act()
            copy(destination[half:], source[half:])

        self._monkeypatch.setattr("slipstream.wire.transports.shm.np.copyto", slow_copy)

    def close(self) -> None:
        for closable in (*self._readers, *self._clients):
            closable.close()
        self.server.close()


@pytest.fixture(params=["grpc", "shm"])
def harness(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    monkeypatch.setenv("SLIPSTREAM_SHM_DIR", str(tmp_path))
    harness = Harness(request.param, PayloadServer(tmp_path, slot_bytes=8 * MEBIBYTE), monkeypatch)
    yield harness
    harness.close()
    assert [path.name for path in tmp_path.iterdir()] == ["slipstream-host"]


def pack_tensors(seed: int = 0, rows: int = 1000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, 49152, (rows,), generator=generator).to(torch.int32),
        "loss_mask": torch.randint(0, 2, (rows,), generator=generator).to(torch.uint8),
        "hidden_states.1": torch.randn(rows, 96, generator=generator).to(torch.bfloat16),
        "hidden_states.5": torch.randn(rows, 96, generator=generator).to(torch.float16),
        "last_hidden_state": torch.full((rows, 96), float("nan")),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].is_contiguous()
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize(
    "names",
    [
        ["input_ids", "loss_mask", "hidden_states.1", "hidden_states.5", "last_hidden_state"],
        ["hidden_states.5"],
        ["last_hidden_state", "loss_mask", "hidden_states.1"],  # neither in order nor neighbours
        [],
    ],
)
def test_reads_the_named_tensors_bit_for_bit(harness: Harness, names: list[str]) -> None:
    tensors = pack_tensors()
    ref = PayloadRef.of_lease(harness.server.put(0, tensors))
    assert_same(harness.reader().read(ref, names), {name: tensors[name] for name in names})


def test_sizes_around_the_chunk_and_empty_tensors(harness: Harness) -> None:
    reader = harness.reader()
    for size in (0, 1, 2 * MEBIBYTE - 1, 2 * MEBIBYTE, 2 * MEBIBYTE + 1, 8 * MEBIBYTE):
        tensors = {"x": torch.arange(size, dtype=torch.uint8)}
        assert_same(reader.read(PayloadRef.of_lease(harness.server.put(0, tensors)), ["x"]), tensors)


def test_what_was_read_belongs_to_the_reader(harness: Harness) -> None:
    reader, first = harness.reader(), pack_tensors(seed=1)
    kept = reader.read(PayloadRef.of_lease(harness.server.put(0, first)), list(first))
    second = pack_tensors(seed=2)
    other = reader.read(PayloadRef.of_lease(harness.server.put(0, second)), list(second))
    reader.close()
    assert_same(kept, first)
    assert_same(other, second)
    kept["loss_mask"].fill_(9)  # writable


def test_missing_tensor_is_named(harness: Harness) -> None:
    ref = PayloadRef.of_lease(harness.server.put(0, pack_tensors()))
    with pytest.raises(SlipstreamError, match=r"no tensor hidden_states\.9; it has input_ids") as caught:
        harness.reader().read(ref, ["input_ids", "hidden_states.9"])
    assert caught.value.reason is Reason.TARGET_INCOMPATIBLE


def test_slot_that_was_used_again_before_the_read(harness: Harness) -> None:
    ref = PayloadRef.of_lease(harness.server.put(0, pack_tensors(seed=1)))
    harness.server.put(0, pack_tensors(seed=2))
    with pytest.raises(SlipstreamError) as caught:
        harness.reader().read(ref, ["input_ids"])
    assert caught.value.reason is Reason.LEASE_LOST


def test_slot_that_is_used_again_during_the_read(harness: Harness) -> None:
    ref = PayloadRef.of_lease(harness.server.put(0, {"x": torch.full((6 * MEBIBYTE,), 1, dtype=torch.uint8)}))
    again = {"x": torch.full((6 * MEBIBYTE,), 2, dtype=torch.uint8)}
    harness.in_the_middle_of_a_read(lambda: harness.server.put(0, again))
    with pytest.raises(SlipstreamError) as caught:
        harness.reader().read(ref, ["x"])
    assert caught.value.reason is Reason.LEASE_LOST


def test_slot_that_is_being_written_during_the_read(harness: Harness) -> None:
    ref = PayloadRef.of_lease(harness.server.put(0, {"x": torch.full((6 * MEBIBYTE,), 1, dtype=torch.uint8)}))
    harness.in_the_middle_of_a_read(lambda: harness.server.arena.begin_write(0))
    with pytest.raises(SlipstreamError) as caught:
        harness.reader().read(ref, ["x"])
    assert caught.value.reason is Reason.LEASE_LOST
    harness.server.arena.end_write(0)


def test_a_busy_neighbour_slot_does_not_disturb(harness: Harness) -> None:
    tensors = {"x": torch.full((6 * MEBIBYTE,), 1, dtype=torch.uint8)}
    ref = PayloadRef.of_lease(harness.server.put(0, tensors))
    harness.in_the_middle_of_a_read(lambda: harness.server.put(1, pack_tensors()))
    assert_same(harness.reader().read(ref, ["x"]), tensors)


def test_two_readers_at_once(harness: Harness) -> None:
    payloads = [{"x": torch.full((6 * MEBIBYTE,), value, dtype=torch.uint8)} for value in (1, 2)]
    refs = [PayloadRef.of_lease(harness.server.put(slot, payload)) for slot, payload in enumerate(payloads)]
    together = threading.Barrier(2, timeout=20)

    def read(number: int, reader: PayloadReader) -> None:
        for turn in range(4):
            together.wait()
            which = (number + turn) % 2
            assert_same(reader.read(refs[which], ["x"]), payloads[which])

    with ThreadPoolExecutor(2) as pool:
        for result in [pool.submit(read, number, harness.reader()) for number in range(2)]:
            result.result(timeout=30)


def test_reader_killed_in_a_read_harms_nobody(harness: Harness) -> None:
    tensors = {"x": torch.arange(8 * MEBIBYTE, dtype=torch.uint8)}
    lease = harness.server.put(0, tensors)
    arguments = [harness.transport, harness.server.address, harness.server.host_id, lease.SerializeToString().hex()]
    victim = subprocess.Popen([sys.executable, "-c", KILLED_READER, *arguments], stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None and victim.stdout.readline() == "read\n"
    victim.kill()  # it reads without a pause, so this hits it inside a read
    victim.communicate(timeout=10)
    reader = harness.reader()
    assert_same(reader.read(PayloadRef.of_lease(lease), ["x"]), tensors)
    again = pack_tensors()
    assert_same(reader.read(PayloadRef.of_lease(harness.server.put(0, again)), list(again)), again)


def test_server_killed_in_a_read(harness: Harness, tmp_path: Path) -> None:
    """Shared memory outlives its server; a stream waits for it to come back as long as the lease would have run."""
    process = start_payload_server(tmp_path, 32 * MEBIBYTE)
    assert process.stdout is not None
    address, lease, host_id = process.stdout.readline().split()
    ref = PayloadRef.of_lease(batch_pb2.Lease.FromString(bytes.fromhex(lease)))
    assert ref.time_to_live == 1.0

    def kill() -> None:
        process.kill()
        process.communicate(timeout=30)

    if harness.transport == "shm":
        harness.in_the_middle_of_a_copy(kill)
        reader = SharedMemoryReader(bytes.fromhex(host_id).decode())
        assert_same(reader.read(ref, ["x"]), {"x": torch.arange(32 * MEBIBYTE, dtype=torch.uint8)})
        assert process.poll() is not None
        reader.close()
        remove_stale_segments(tmp_path)
        return
    with TargetClient(address) as client, ThreadPoolExecutor(1) as pool:
        read = pool.submit(GrpcReader(client.channel).read, ref, ["x"])
        assert process.stdout.readline() == "stalled\n"
        kill()
        with pytest.raises(SlipstreamError, match="away for longer than the lease of 1 s") as caught:
            read.result(timeout=30)
    assert caught.value.reason is Reason.LEASE_LOST
    remove_stale_segments(tmp_path)


def test_manifest_that_reaches_beyond_the_payload(harness: Harness) -> None:
    lease = harness.server.put(0, pack_tensors())
    lease.manifest.tensors[0].offset_bytes = lease.manifest.payload_size_bytes
    with pytest.raises(SlipstreamError) as caught:
        harness.reader().read(PayloadRef.of_lease(lease), ["input_ids"])
    assert caught.value.reason is Reason.PAYLOAD_CORRUPT
