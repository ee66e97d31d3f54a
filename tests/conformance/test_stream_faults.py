"""What trainers, memory and time may do to a stream, over every transport: a real server, a real ledger, real reads.

Whatever happens, each run gets every pack once, in order, with the bytes that the target gives; the ledger proves it.
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from target_server.lineage import lineage_report
from tests.fakes.ledger_desk import locked_by_another_program
from tests.fakes.plain_trainer import Trainer, assert_same
from tests.fakes.stream_harness import Harness, in_the_middle_of_a_copy

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


def test_a_lock_on_the_ledger_holds_up_only_who_must_write(harness: Harness) -> None:
    run, other = harness.trainer("run"), harness.trainer("other")
    (lease,) = run.lease(packs=1).leases
    run.packs[0] = run.read(lease)
    assert run.confirm(lease)
    waits: list[Reason] = []
    waiting = threading.Event()

    def note(reason: Reason, _seconds: float) -> None:
        waits.append(reason)
        waiting.set()

    run.client._on_wait = note
    with ThreadPoolExecutor(1) as pool:
        with locked_by_another_program(harness.server.store):
            committed = pool.submit(run.commit, 0)
            assert waiting.wait(30)
            while not other.packs:
                for lease in other.lease(packs=2).leases:
                    other.packs[lease.manifest.sequence_number] = other.read(lease)
                    assert other.confirm(lease)
            assert not committed.done()
        committed.result(timeout=30)
    assert set(waits) == {Reason.LEDGER_UNWRITABLE}
    run.train(until=3)
    assert harness.proves(run)


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
