"""Runs that share a stream, over every transport: who is stuck, paused or reads other layers costs the others nothing.

And where there is no shared memory, or too little of it.
"""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1 import stream_admin_service_pb2 as admin_pb
from slipstream.run_spec.reasons import Reason
from slipstream.wire.codec import DTYPES
from slipstream.wire.transports import choose
from target_server.target_model import TargetModel
from tests.fakes.live_target import LiveTarget
from tests.fakes.plain_trainer import assert_same
from tests.fakes.stream_harness import SHELF_BYTES, Harness, in_the_middle_of_a_copy


def test_one_stuck_subscriber(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops in the middle of a read and keeps its leases alive; the shelf is full. The others finish meanwhile."""
    everything = harness.undisturbed()
    stuck = harness.trainer("stuck")
    held = stuck.lease(packs=8).leases
    reading, go_on = threading.Event(), threading.Event()

    def stall(_copied: Any) -> None:
        reading.set()
        assert go_on.wait(120)

    with ThreadPoolExecutor(3) as pool, monkeypatch.context() as patch:
        in_the_middle_of_a_copy(harness, patch, stall)
        read = pool.submit(stuck.read, held[0])
        try:
            assert reading.wait(30)
            others = [harness.trainer(f"other-{number}") for number in range(2)]
            finishing = [pool.submit(other.train) for other in others]
            renewal = pb.RenewLeasesRequest(lease_tokens=[lease.lease_token for lease in held])
            renewal.time_to_live.seconds = 30
            while wait(finishing, timeout=0.05).not_done:
                assert not stuck.client.renew_leases(renewal).lost_lease_tokens
                harness.server.pass_time(1.0)
        finally:
            go_on.set()
        assert_same({0: read.result(timeout=30)}, {0: everything[0]})
    assert stuck.confirm(held[0]), "its lease was good all the time"
    for other in others:
        assert_same(other.packs, everything)
        assert harness.proves(other)


def test_the_union_of_layers(harness: Harness) -> None:
    """Two runs that read other layers: one pass, and each reads its own."""
    everything = harness.undisturbed()
    a = harness.trainer("a", layers=(0,), last_hidden_state=False)
    a.train(until=2)
    b = harness.trainer("b", layers=(1, 2))
    a.train()
    b.train()
    for number, tensors in everything.items():
        for name in ("input_ids", "hidden_states.0"):
            assert a.packs[number][name].equal(tensors[name])
        assert b.packs[number]["hidden_states.2"].equal(tensors["hidden_states.2"])
        assert b.packs[number]["hidden_states.1"].dtype in DTYPES.values()
    assert harness.proves(a) and harness.proves(b)


def test_pause_seek_and_drain(harness: Harness) -> None:
    """Each is heard over the wire; a paused run holds nobody up, and a seek starts over exactly at its cursor."""
    everything = harness.undisturbed()
    run, other = harness.trainer("run"), harness.trainer("other", epochs=3)
    run.train(until=2)
    run.client.pause_subscription(admin_pb.PauseSubscriptionRequest(subscription=run.opened.subscription))
    response = run.lease(max_wait=0)
    assert (response.stream_state, len(response.leases)) == (pb.STREAM_STATE_PAUSED, 0)
    other.train()
    assert len(other.packs) > 2 * len(everything), "far beyond the shelf, without waiting"
    run.client.resume_subscription(admin_pb.ResumeSubscriptionRequest(subscription=run.opened.subscription))
    before = run.stats().packs_recomputed
    run.train(until=4)
    assert run.stats().packs_recomputed > before
    del run.packs[3]
    run.join(next_step=3)
    (lease, *_) = run.lease().leases
    run.client.drain_target(admin_pb.DrainTargetRequest())
    assert_same({3: run.read(lease)}, {3: everything[3]})
    assert run.confirm(lease), "what is leased is finished"
    run.commit(3)
    assert run.lease(max_wait=0).stream_state == pb.STREAM_STATE_DRAINING
    assert harness.proves(run) and harness.proves(other)


class TestWithoutSharedMemory:
    """macOS and WSL have no /dev/shm; containers have one of 64 MiB."""

    @pytest.fixture
    def nowhere(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("SLIPSTREAM_SHM_DIR", raising=False)
        monkeypatch.setattr("slipstream.wire.arena._DEFAULT_SHM_DIR", tmp_path / "none")
        monkeypatch.setitem(choose.FLOORS_GIGABYTES_PER_SECOND, "grpc", 0.0)

    @pytest.mark.parametrize("transport", ["auto", "grpc"])
    def test_a_stream_goes_over_grpc(
        self, nowhere: None, target: TargetModel, data: str, tmp_path: Path, transport: str
    ) -> None:
        harness = Harness(LiveTarget(target, tmp_path / "ledger.sqlite", shm_dir=None), transport, data)
        run = harness.trainer("run")
        assert run.reader.name == "grpc"
        run.train(until=2)
        assert not any(lease.locations[1:] for lease in run.lease().leases)
        harness.close()

    def test_shared_memory_by_name_is_refused(
        self, nowhere: None, target: TargetModel, data: str, tmp_path: Path
    ) -> None:
        harness = Harness(LiveTarget(target, tmp_path / "ledger.sqlite", shm_dir=None), "shm", data)
        with pytest.raises(SlipstreamError, match="offers no shared memory") as caught:
            harness.trainer("run")
        assert caught.value.reason is Reason.TRANSPORT_UNAVAILABLE and "--no-shm" in caught.value.remedy
        harness.close()

    def test_memory_that_does_not_hold_the_ring_refuses_the_run_and_serves_on(
        self, target: TargetModel, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLIPSTREAM_SHM_DIR", str(tmp_path))
        monkeypatch.setitem(choose.FLOORS_GIGABYTES_PER_SECOND, "shm", 0.0)
        harness = Harness(
            LiveTarget(target, tmp_path / "ledger", shm_dir=tmp_path, shelf_bytes=SHELF_BYTES), "shm", data
        )
        small = SimpleNamespace(f_bavail=100, f_frsize=4096, f_blocks=200)
        with monkeypatch.context() as patch, pytest.raises(SlipstreamError, match="MiB free of") as caught:
            patch.setattr("slipstream.wire.arena.os.statvfs", lambda _directory: small)
            harness.trainer("run")
        assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED and "--shm-size" in caught.value.remedy
        run = harness.trainer("run")  # somebody made it larger
        run.train(until=2)
        harness.close()
