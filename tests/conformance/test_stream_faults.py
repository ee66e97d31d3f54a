"""What trainers, memory and time may do to a stream, over every transport: a real server, a real ledger, real reads.

Whatever happens, each run gets every pack once, in order, with the bytes that the target gives; the ledger proves it.
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1 import stream_admin_service_pb2 as admin_pb
from slipstream.hidden_states.v1.stream_admin_service_pb2_grpc import StreamAdminServiceStub
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.wire.channel import TargetClient
from slipstream.wire.codec import DTYPES
from slipstream.wire.transports import choose
from target_server.lineage import lineage_report
from target_server.target_model import TargetModel
from tests.fakes.live_target import LiveTarget
from tests.fakes.plain_trainer import Tensors, Trainer, assert_same
from tests.fakes.served_model import data_spec_json, write_conversations, write_tiny_target

SHELF_BYTES = 700_000
"""Seven packs, of thirteen in an epoch."""
TRAINER_THAT_STALLS = """
import sys, threading
from slipstream.wire.channel import TargetClient
from slipstream.wire.transports import choose
from tests.fakes.plain_trainer import Trainer

name, address, data = sys.argv[1:]
choose.FLOORS_GIGABYTES_PER_SECOND[name] = 0.0
run = Trainer(TargetClient(address), "mortal", data, transport=name)
run.join()
run.train(until=2)
(lease, *_) = run.lease().leases

def stall(*_):
    print("reading", flush=True)
    threading.Event().wait()

module = sys.modules["slipstream.wire.transports." + name]
if name == "shm":
    module.np.copyto = stall
else:
    module._store = stall
run.read(lease)
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    directory = write_tiny_target(tmp_path_factory.mktemp("model"))
    return TargetModel.load(TargetSpec(model=str(directory), dtype="float32"), device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return data_spec_json(write_conversations(tmp_path_factory.mktemp("data") / "conversations.jsonl"))


class Harness:
    """A server, the transport in question, and trainers on it."""

    def __init__(self, server: LiveTarget, transport: str, data: str) -> None:
        self.server = server
        self.transport = transport
        self.data = data
        self._clients: list[TargetClient] = []

    def trainer(self, run: str, *, next_step: int = 0, **settings: Any) -> Trainer:
        """A trainer that has joined, with a client of its own."""
        self._clients.append(TargetClient(self.server.address))
        trainer = Trainer(self._clients[-1], run, self.data, transport=self.transport, **settings)
        trainer.join(next_step)
        return trainer

    def undisturbed(self) -> dict[int, Tensors]:
        """Every pack of the stream."""
        run = self.trainer("undisturbed")
        run.train()
        self.leave(run)
        return run.packs

    def leave(self, run: Trainer) -> None:
        request = pb.ReleaseLeasesRequest(
            reason=pb.RELEASE_REASON_SHUTDOWN, subscription=run.opened.subscription, incarnation=run.incarnation
        )
        run.client.release_leases(request)

    def release(self, run: Trainer, lease: batch_pb2.Lease, reason: "pb.ReleaseReason") -> None:
        run.client.release_leases(pb.ReleaseLeasesRequest(lease_tokens=[lease.lease_token], reason=reason))

    def flip_bit(self, run: Trainer, lease: batch_pb2.Lease, tensor: str) -> None:
        """In the slot where a leased pack lies."""
        stream = self.server.catalog.get(run.opened.stream)
        with self.server.book.lock:
            index = self.server.book.leases[lease.lease_token].slot.index
        (spec,) = [spec for spec in lease.manifest.tensors if spec.name == tensor]
        stream.arena.slot(index)[spec.offset_bytes + spec.size_bytes // 2] ^= 1

    def proves(self, run: Trainer) -> bool:
        return lineage_report(self.server.ledger_file, run.run).exactly_once

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close()


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


def in_the_middle_of_a_copy(harness: Harness, monkeypatch: pytest.MonkeyPatch, act: Callable[[Any], None]) -> None:
    """Call `act`, once, with what the reader has copied so far, when a part is copied and a part is not."""
    acted: list[None] = []

    def once(destination: Any) -> None:
        if not acted:
            acted.append(None)
            act(destination)

    if harness.transport == "shm":
        copy = np.copyto

        def slow_copy(destination: Any, source: Any) -> None:
            half = len(source) // 2
            copy(destination[:half], source[:half])
            once(destination[:half])
            copy(destination[half:], source[half:])

        monkeypatch.setattr("slipstream.wire.transports.shm.np.copyto", slow_copy)
        return
    from slipstream.wire.transports import grpc as module

    store = module._store

    def slow_store(chunk: bytes, buffer: Any, position: int) -> int:
        end = store(chunk, buffer, position)
        once(buffer[:end])
        return end

    monkeypatch.setattr(module, "_store", slow_store)


def test_trainer_killed_in_a_read(harness: Harness) -> None:
    """kill -9: its successor goes on at the cursor at once, though the dead one's leases still run."""
    everything = harness.undisturbed()
    arguments = [harness.transport, harness.server.address, harness.data]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    victim = subprocess.Popen(
        [sys.executable, "-c", TRAINER_THAT_STALLS, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert victim.stdout is not None and victim.stdout.readline() == "reading\n"
    victim.kill()
    victim.communicate(timeout=30)
    with harness.server.book.lock:
        assert harness.server.book.leases, "they have not run out"
    successor = harness.trainer("mortal", next_step=2)
    successor.packs = {0: everything[0], 1: everything[1]}
    successor.train()
    assert_same(successor.packs, everything)
    with harness.server.book.lock:
        assert not harness.server.book.leases
    assert harness.proves(successor)


def test_stale_commit(harness: Harness) -> None:
    """Of a trainer that was taken over, and of a step that another incarnation has to do again."""
    older = harness.trainer("run")
    older.train(until=3)
    newer = harness.trainer("run", next_step=1, incarnation=older.incarnation)
    newer.packs = {0: older.packs[0]}
    for step in (2, 3, 0):
        with pytest.raises(SlipstreamError) as caught:
            older.commit(step)
        assert caught.value.reason is Reason.INCARNATION_STALE
    with pytest.raises(SlipstreamError, match="not committed|were handed out") as early:
        newer.commit(2)
    assert early.value.reason is Reason.SPEC_INVALID
    newer.train()
    newer.commit(len(newer.packs) - 1)  # once more: the answer might have been lost
    report = lineage_report(harness.server.ledger_file, "run")
    assert report.exactly_once
    assert (report.next_sequence_number, report.steps_discarded) == (len(newer.packs), 2)


def test_slot_that_is_reused_under_a_slow_reader(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = harness.undisturbed()
    slow, fast = harness.trainer("slow"), harness.trainer("fast", epochs=3)
    (lease,) = slow.lease(packs=1).leases
    number = lease.manifest.sequence_number

    def slot_goes_to_others(_copied: Any) -> None:
        harness.server.pass_time(31.0)  # the lease has run out, and nobody waits for the slow one
        fast.join()
        fast.train()

    with monkeypatch.context() as patch:
        in_the_middle_of_a_copy(harness, patch, slot_goes_to_others)
        try:
            assert_same({number: slow.read(lease)}, {number: everything[number]})
        except SlipstreamError as error:
            assert error.reason is Reason.LEASE_LOST
        else:
            assert harness.transport == "grpc", "all of it was on its way already"
    assert not slow.confirm(lease)
    assert len(fast.packs) > 2 * len(everything)
    assert_same({number: fast.packs[number] for number in everything}, everything)
    (again,) = slow.lease(packs=1).leases
    assert (again.manifest.sequence_number, again.delivery_attempt) == (number, 2)
    assert_same({number: slow.read(again)}, {number: everything[number]})
    assert slow.confirm(again)


def train_through_lost_leases(run: Trainer) -> None:
    """As the product does: a lease that was lost is leased again."""
    step = 0
    while run.state != pb.STREAM_STATE_EXHAUSTED:
        for lease in run.lease(packs=2).leases:
            try:
                tensors = run.read(lease)
                confirmed = run.confirm(lease)
            except SlipstreamError as error:
                assert error.reason is Reason.LEASE_LOST, error
                continue
            if confirmed:
                run.packs[lease.manifest.sequence_number] = tensors
        while step in run.packs:
            run.commit(step)
            step += 1


def test_trainers_come_and_go_under_load(harness: Harness) -> None:
    """Some leave in order, some just vanish; who stays notices nothing."""
    everything = harness.undisturbed()
    staying = harness.trainer("staying", epochs=3)
    begun = threading.Barrier(3, timeout=30)

    def visit(visitor: int) -> None:
        begun.wait()
        for turn in range(4):
            run = harness.trainer(f"visitor-{visitor}-{turn}")
            if turn == 2:
                train_through_lost_leases(run)
            for lease in run.lease().leases:
                try:
                    run.read(lease)
                except SlipstreamError as error:  # the other visitor has put the clock forward
                    assert error.reason is Reason.LEASE_LOST, error
            if turn % 2:
                harness.leave(run)
            else:  # its leases are never confirmed, and it hangs up
                run.client.close()
                harness.server.pass_time(31.0)
            assert_same(run.packs, {number: everything[number] for number in run.packs})

    with ThreadPoolExecutor(3) as pool:
        visits = [pool.submit(visit, visitor) for visitor in range(2)]
        begun.wait()
        train_through_lost_leases(staying)
        for each in visits:
            each.result(timeout=60)
    assert len(staying.packs) > 2 * len(everything)
    assert_same({number: staying.packs[number] for number in everything}, everything)
    assert harness.proves(staying)
    harness.server.pass_time(31.0)
    assert harness.server.control.wait_until_drained(0.0), "no lease is left"


def checked_tensors(transport: str) -> Sequence[str]:
    """Where a flipped bit is noticed: shared memory has checksums of small tensors only."""
    return ("input_ids", "hidden_states.2") if transport == "grpc" else ("input_ids", "loss_mask")


def test_bit_that_flips_on_the_way_is_mended_by_reading_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = harness.undisturbed()
    run = harness.trainer("run")
    (lease,) = run.lease(packs=1).leases

    def flip(copied: Any) -> None:
        copied[0] ^= 1

    in_the_middle_of_a_copy(harness, monkeypatch, flip)
    assert_same({0: run.read(lease)}, {0: everything[0]})
    assert run.confirm(lease)


def test_damaged_slot_is_computed_again_and_a_pack_damaged_twice_is_left_out(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    everything = harness.undisturbed()
    run = harness.trainer("run")
    (lease,) = run.lease(packs=1).leases
    recomputed = run.stats().packs_recomputed
    for attempt, tensor in enumerate(checked_tensors(harness.transport), start=1):
        assert (lease.manifest.sequence_number, lease.delivery_attempt) == (0, attempt)
        assert_same({0: run.read(lease)}, {0: everything[0]})
        harness.flip_bit(run, lease, tensor)
        with pytest.raises(SlipstreamError, match=f"'{tensor}' was read with crc32c .*, twice") as caught:
            run.read(lease)
        assert caught.value.reason is Reason.PAYLOAD_CORRUPT
        assert "pack_quarantined" not in caplog.text
        with caplog.at_level(logging.WARNING):
            harness.release(run, lease, pb.RELEASE_REASON_PACK_CORRUPT)
        if attempt == 1:
            (lease,) = run.lease(packs=1).leases
            assert run.stats().packs_recomputed == recomputed + 1, "not the damaged bytes once more"
    response = run.lease(packs=1)
    assert list(response.quarantined_sequence_numbers) == [0]
    assert response.leases[0].manifest.sequence_number == 1
    (named,) = [record for record in caplog.records if record.message == "pack_quarantined"]
    assert named.slipstream_fields["documents"] and named.slipstream_fields["why"] == "RELEASE_REASON_PACK_CORRUPT"
    (stats,) = [each for each in run.stats().subscriptions if each.subscription == run.opened.subscription]
    assert stats.packs_quarantined == 1
    other = harness.trainer("other")
    other.train(until=1)
    assert_same(other.packs, {0: everything[0]})  # it was this run's reads that failed


def test_pauses_kills_and_lost_leases_never_quarantine(harness: Harness) -> None:
    run = harness.trainer("run")
    for reason in (pb.RELEASE_REASON_PAUSE, pb.RELEASE_REASON_SHUTDOWN, pb.RELEASE_REASON_UNSPECIFIED) * 2:
        (lease,) = run.lease(packs=1).leases
        harness.release(run, lease, reason)
        run.lease(packs=1)
        harness.server.pass_time(61.0)
    response = run.lease(packs=1)
    assert response.leases[0].manifest.sequence_number == 0 and not response.quarantined_sequence_numbers


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
    StreamAdminServiceStub(run.client.channel).DrainTarget(admin_pb.DrainTargetRequest(), timeout=30)
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
