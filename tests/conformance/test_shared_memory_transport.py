"""What only shared memory can suffer: absent, foreign or full directories, dead owners, vanished segments."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.run_spec.reasons import Reason
from slipstream.wire.arena import PayloadArena
from slipstream.wire.transports import PayloadRef, SharedMemoryReader
from tests.fakes.payload_server import PayloadServer, start_payload_server

MEBIBYTE = 2**20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PayloadServer]:
    server = PayloadServer(tmp_path, num_slots=1, slot_bytes=MEBIBYTE)
    yield server
    server.close()


def reason_of(reader: SharedMemoryReader, lease: batch_pb2.Lease) -> Reason:
    with pytest.raises(SlipstreamError) as caught:
        reader.read(PayloadRef.of_lease(lease), ["x"])
    return caught.value.reason


def mapped_segments(directory: Path) -> list[str]:
    """Lines of this process's memory map; other tests may have left segments of other directories there."""
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if f"{directory}/slipstream-segment-" in line
    ]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_foreign_directory_is_refused(server: PayloadServer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for host_id, directory in ((server.host_id, other), ("somebody else", tmp_path)):
        with pytest.raises(SlipstreamError, match="not the one this process sees") as caught:
            SharedMemoryReader(host_id, directory=directory)
        assert caught.value.reason is Reason.TRANSPORT_UNAVAILABLE


def test_server_without_shared_memory(tmp_path: Path) -> None:
    server = PayloadServer(None)
    assert server.host_id == "" and PayloadRef.of_lease(server.put(0, {"x": torch.ones(1)})).shared_memory is None
    with pytest.raises(SlipstreamError, match="offers no shared memory") as caught:
        SharedMemoryReader(server.host_id, directory=tmp_path)
    assert caught.value.reason is Reason.TRANSPORT_UNAVAILABLE
    server.close()


def test_full_directory_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="shared memory; .* free of") as caught:
        PayloadArena.create(2**12, 2**40, directory=tmp_path)
    assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED and "--shelf-bytes" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_small_tmpfs_is_an_error_and_leaves_its_space_free(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        first = PayloadArena.create(1, 2 * MEBIBYTE, directory=tmp_path)
        with pytest.raises(SlipstreamError, match=r"needs 3\.0 MiB .* has 2\.0 MiB free of 4\.0 MiB") as caught:
            PayloadArena.create(1, 3 * MEBIBYTE - 4096, directory=tmp_path)
        assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED
        first.slot(0)[:] = 1  # every page was reserved: no SIGBUS
        first.close()
        PayloadArena.create(1, 3 * MEBIBYTE, directory=tmp_path).close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_bytes_outlive_their_server_until_the_next_one_cleans_up(tmp_path: Path) -> None:
    process = start_payload_server(tmp_path, MEBIBYTE)
    assert process.stdout is not None
    _, lease_hex, host_id_hex = process.stdout.readline().split()
    lease = batch_pb2.Lease.FromString(bytes.fromhex(lease_hex))
    ref, host_id = PayloadRef.of_lease(lease), bytes.fromhex(host_id_hex).decode()
    expected = torch.arange(MEBIBYTE, dtype=torch.uint8)
    reader = SharedMemoryReader(host_id, directory=tmp_path)
    assert torch.equal(reader.read(ref, ["x"])["x"], expected)
    process.kill()
    process.communicate(timeout=10)
    assert torch.equal(reader.read(ref, ["x"])["x"], expected)

    successor = PayloadServer(tmp_path, slot_bytes=MEBIBYTE)  # removes the dead server's segment
    assert torch.equal(reader.read(ref, ["x"])["x"], expected)  # the mapping still stands
    assert reason_of(SharedMemoryReader(host_id, directory=tmp_path), lease) is Reason.LEASE_LOST
    fresh = PayloadRef.of_lease(successor.put(0, {"x": torch.ones(3)}))
    assert torch.equal(reader.read(fresh, ["x"])["x"], torch.ones(3))
    assert len(mapped_segments(tmp_path)) == 2  # the successor's own and the reader's: the dead server's is gone
    reader.close()
    successor.close()
    assert mapped_segments(tmp_path) == [] and [path.name for path in tmp_path.iterdir()] == ["slipstream-host"]


def test_reading_leaks_neither_descriptors_nor_mappings(server: PayloadServer, tmp_path: Path) -> None:
    lease = server.put(0, {"x": torch.ones(1000)})
    descriptors = open_descriptors()
    for _ in range(5):
        reader = SharedMemoryReader(server.host_id, directory=tmp_path)
        reader.read(PayloadRef.of_lease(lease), ["x"])
        reader.read(PayloadRef.of_lease(lease), ["x"])
        reader.close()
        reader.close()
    assert open_descriptors() == descriptors
    assert len(mapped_segments(tmp_path)) == 1


def test_location_that_is_no_slot(server: PayloadServer, tmp_path: Path) -> None:
    reader = SharedMemoryReader(server.host_id, directory=tmp_path)
    for change in (1, -4096, 2**20, 2**40):
        lease = server.put(0, {"x": torch.ones(10)})
        lease.locations[1].shared_memory.offset_bytes += change
        assert reason_of(reader, lease) is Reason.PAYLOAD_CORRUPT
    reader.close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../etc/passwd", Reason.PAYLOAD_CORRUPT),
        ("slipstream-segment-/../../x", Reason.PAYLOAD_CORRUPT),
        ("slipstream-segment-foreign", Reason.PAYLOAD_CORRUPT),
        ("slipstream-segment-torn", Reason.PAYLOAD_CORRUPT),
        ("slipstream-segment-gone", Reason.LEASE_LOST),
    ],
)
def test_segment_that_is_none(server: PayloadServer, tmp_path: Path, name: str, reason: Reason) -> None:
    lease = server.put(0, {"x": torch.ones(10)})
    real = (tmp_path / lease.locations[1].shared_memory.segment_name).read_bytes()
    (tmp_path / "slipstream-segment-foreign").write_bytes(b"x" * 10000)
    (tmp_path / "slipstream-segment-torn").write_bytes(real[:-1])  # shorter than its header says
    lease.locations[1].shared_memory.segment_name = name
    reader = SharedMemoryReader(server.host_id, directory=tmp_path)
    assert reason_of(reader, lease) is reason


def test_for_a_gpu_packs_are_read_where_they_lie(
    server: PayloadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the driver's part is left out: tests/gpu has it."""
    monkeypatch.setattr("slipstream.wire.transports.shm.lock_pages", lambda _memory, effect: bool(effect))
    reader = SharedMemoryReader(server.host_id, directory=tmp_path, pin_memory=True)
    lease = server.put(0, {"x": torch.arange(5), "y": torch.ones(3, 2)})
    read = reader.read(PayloadRef.of_lease(lease), ["y", "x"])
    assert (list(read), read["x"].tolist(), read["y"].shape) == (["y", "x"], list(range(5)), (3, 2))
    server.arena.slot(0)[:8] = 7
    assert read["x"].tolist()[0] == 0x0707070707070707, "no copy"
    later = server.put(0, {"x": torch.arange(5), "y": torch.ones(3, 2)})
    assert reason_of(reader, lease) is Reason.LEASE_LOST
    read = reader.read(PayloadRef.of_lease(later), ["x"])
    assert read["x"].tolist() == list(range(5))
    del read
    reader.close()
    assert len(mapped_segments(tmp_path)) == 1, "the server's own"
