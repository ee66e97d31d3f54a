"""Slots, generations, life and death of shared-memory segments."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.arena import (
    PayloadArena,
    SegmentHeader,
    create_host_id,
    read_host_id,
    remove_stale_segments,
    shared_memory_directory,
)

OWNER = """
import sys, pathlib
from slipstream.wire.arena import PayloadArena
arena = PayloadArena.create(2, 100, directory=pathlib.Path(sys.argv[1]))
print(arena.location(0).segment_name, flush=True)
sys.stdin.read()
"""


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("slipstream-segment-*"))


@pytest.mark.parametrize("shared", [True, False])
def test_slots_and_generations(tmp_path: Path, shared: bool) -> None:
    arena = PayloadArena.create(3, 5000, directory=tmp_path if shared else None)
    assert arena.num_slots == 3 and arena.slot_bytes == 8192
    for index in range(3):
        arena.begin_write(index)
        assert arena.generation(index) == 1
        arena.slot(index)[:] = index + 1
        arena.end_write(index)
    assert [arena.generation(index) for index in range(3)] == [2, 2, 2]
    assert [int(arena.slot(index).sum()) for index in range(3)] == [8192, 2 * 8192, 3 * 8192]
    arena.begin_write(1)
    arena.end_write(1)
    assert [arena.generation(index) for index in range(3)] == [2, 4, 2]
    arena.close()
    arena.close()
    assert segments(tmp_path) == []


def test_location_leads_to_the_bytes_in_the_file(tmp_path: Path) -> None:
    arena = PayloadArena.create(2, 4096, directory=tmp_path)
    arena.begin_write(1)
    arena.slot(1)[:3] = [7, 8, 9]
    arena.end_write(1)
    location = arena.location(1)
    assert location is not None and location.slot_generation == 2
    raw = (tmp_path / location.segment_name).read_bytes()
    assert raw[location.offset_bytes : location.offset_bytes + 3] == bytes([7, 8, 9])
    header = SegmentHeader.unpack(raw)
    assert header == SegmentHeader(2, 4096)
    assert header.segment_bytes == len(raw)
    assert header.generations(np.frombuffer(raw, np.uint8)).tolist() == [0, 2]
    arena.close()


def test_private_memory_has_no_location() -> None:
    arena = PayloadArena.create(1, 10, directory=None)
    assert arena.location(0) is None
    arena.close()


def test_views_outlive_close(tmp_path: Path) -> None:
    arena = PayloadArena.create(1, 10, directory=tmp_path)
    view = arena.slot(0)
    arena.close()
    view[:] = 3
    assert view[0] == 3 and segments(tmp_path) == []


def test_foreign_bytes_are_no_header() -> None:
    good = SegmentHeader(3, 4096).pack()
    assert SegmentHeader.unpack(good) == SegmentHeader(3, 4096)
    assert SegmentHeader.unpack(good[:-1]) is None
    assert SegmentHeader.unpack(b"x" + good[1:]) is None


def test_segment_of_a_killed_owner_is_removed_and_that_of_a_living_one_kept(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    assert remove_stale_segments(tmp_path) == [] and segments(tmp_path) == [name]
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=10)
    assert segments(tmp_path) == [name]
    arena = PayloadArena.create(1, 10, directory=tmp_path)  # a start cleans up
    assert name not in segments(tmp_path) and len(segments(tmp_path)) == 1
    arena.close()


def test_only_segments_are_removed(tmp_path: Path) -> None:
    (tmp_path / "somebody-else").write_text("x")
    (tmp_path / "slipstream-segment-1-torn").write_bytes(b"")  # its owner died before it wrote a header
    create_host_id(tmp_path)
    assert remove_stale_segments(tmp_path) == ["slipstream-segment-1-torn"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slipstream-host", "somebody-else"]


def test_host_id_is_one_per_directory(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    assert read_host_id(first) is None
    identity = create_host_id(first)
    assert create_host_id(first) == identity == read_host_id(first)
    assert create_host_id(second) != identity
    assert [path.name for path in first.iterdir()] == ["slipstream-host"]


def test_directory_that_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "missing"
    monkeypatch.setenv("SLIPSTREAM_SHM_DIR", str(missing))
    for act in (
        shared_memory_directory,
        lambda: PayloadArena.create(1, 10, directory=missing),
        lambda: create_host_id(missing),
    ):
        with pytest.raises(SlipstreamError, match="does not exist") as caught:
            act()
        assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED and "--no-shm" in caught.value.remedy
    monkeypatch.setenv("SLIPSTREAM_SHM_DIR", str(tmp_path))
    assert shared_memory_directory() == tmp_path


@pytest.mark.parametrize("call", ["write_text", "chmod"])
def test_a_full_directory_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(_self: Path, *_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, call, full)
    with pytest.raises(SlipstreamError, match="takes no file: No space left") as caught:
        create_host_id(tmp_path)
    assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED and "--no-shm" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []
