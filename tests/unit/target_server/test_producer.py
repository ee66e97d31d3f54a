"""The engine that fills the slots of streams: what it writes, and what it leaves behind when it fails."""

import dataclasses
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.hidden_states.v1 import batch_pb2
from slipstream.run_spec.spec import TargetSpec
from slipstream.wire.codec import checksum, view_tensor
from target_server.lease_book import DeliveryState
from target_server.lease_ledger import Ask
from target_server.producer import Producer, Throughput
from target_server.slot_writer import SlotWrite, SlotWriter
from target_server.stream import SMALL_TENSORS, Stream
from target_server.subscription import Lease, SubscriptionTerms
from target_server.target_model import TargetModel
from tests.fakes.served_model import LAYERS, write_tiny_target
from tests.fakes.stepped_target import SteppedTarget


def described(stream: Stream, lease: Lease, *, checksums: bool) -> batch_pb2.PackManifest:
    found = stream.describe(lease, checksums=checksums)
    assert found is not None
    return found[0]


def test_what_the_engine_writes_is_what_the_target_gives(engine: SteppedTarget, terms: SubscriptionTerms) -> None:
    name, stream_name = engine.join(terms)
    engine.run(name, packs=2)
    stream = engine.catalog.get(stream_name)
    leases = engine.ledger.lease(name, Ask(1, 2)).leases
    assert [lease.sequence_number for lease in leases] == [0, 1]
    for lease in leases:
        pack = stream.sequence.pack(lease.sequence_number)
        expected = {
            "input_ids": torch.from_numpy(pack.token_ids),
            "loss_mask": torch.from_numpy(pack.loss_mask),
            "document_ids": torch.from_numpy(pack.document_ids),
            "position_ids": torch.from_numpy(pack.position_ids),
            **engine.target.capture(pack.token_ids, pack.document_lengths, LAYERS, True),
        }
        slot = stream.arena.slot(lease.slot.index)
        plain = described(stream, lease, checksums=False)
        assert {spec.name for spec in plain.tensors if spec.crc32c} == set(SMALL_TENSORS)
        manifest = described(stream, lease, checksums=True)
        assert manifest.num_tokens == pack.num_tokens
        assert manifest.num_supervised_tokens == pack.num_supervised
        assert {spec.name for spec in manifest.tensors} == expected.keys()
        for spec in manifest.tensors:
            assert torch.equal(view_tensor(slot, spec), expected[spec.name]), spec.name
            assert spec.crc32c == checksum(slot[spec.offset_bytes : spec.offset_bytes + spec.size_bytes])


def test_hidden_states_that_are_not_finite_are_quarantined(
    tmp_path: Path, terms: SubscriptionTerms, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_tiny_target(tmp_path / "broken")
    target = TargetModel.load(TargetSpec(model=str(directory), dtype="float32"), device="cpu")
    engine = SteppedTarget(target, tmp_path / "ledger.sqlite")
    name, stream_name = engine.join(terms)
    pack = engine.catalog.get(stream_name).sequence.pack(0)
    # A token that only pack 0 needs to have: every state after it is NaN.
    with torch.no_grad():
        target._model.get_input_embeddings().weight[pack.token_ids[0]] = float("nan")
    with caplog.at_level("WARNING"):
        engine.run(name, packs=1)
    assert engine.ledger.lease(name, Ask(1)).quarantined[0] == 0
    assert "pack_quarantined" in caplog.text
    assert any(
        pack.document_names == getattr(record, "slipstream_fields", {}).get("documents") for record in caplog.records
    )
    engine.close()


def test_an_engine_that_fails_leaves_no_half_written_pack(
    engine: SteppedTarget, terms: SubscriptionTerms, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = engine.join(terms)

    def fail(*_arguments: object) -> None:
        raise RuntimeError("device-side assert")

    engine.ledger.lease(name, Ask(1))
    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "capture", fail)
        with pytest.raises(RuntimeError, match="device-side"):
            engine.producer.run()
    grant = engine.ledger.lease(name, Ask(1))
    assert (grant.leases, grant.state) == ((), DeliveryState.ACTIVE)


def test_packs_launched_ahead_are_published_in_order_and_not_lost_at_the_end(
    engine: SteppedTarget, terms: SubscriptionTerms, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU, where the next pack is launched before the one before is published."""
    name, stream_name = engine.join(terms)
    engine.producer._packs_in_flight = 1
    engine.ledger.lease(name, Ask(1, 3))
    running = threading.Thread(target=engine.producer.run, daemon=True)
    with caplog.at_level("INFO"):
        running.start()
        taken = []
        while len(taken) < 3:  # the last one is published when nothing more is wanted
            grant = engine.ledger.lease(name, Ask(1, 3 - len(taken), max_wait=30.0))
            assert grant.leases
            taken += [lease.sequence_number for lease in grant.leases]
        engine.queue.close()
        running.join(30)
    assert (taken, running.is_alive()) == ([0, 1, 2], False)
    assert "engine_times" in caplog.text
    assert not engine.ledger._book.shelves[stream_name].is_writing


class BusyDevice(SlotWriter):
    """Writes slots at once, and says that the device is still at it until `finished` is set."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.begun: queue.Queue[int] = queue.Queue()
        self.asked, self.finished = threading.Event(), threading.Event()

    def _ask(self, answer: Callable[[], bool]) -> bool:
        self.asked.set()
        return answer()

    def begin(self, *arguments: Any) -> SlotWrite:
        write = super().begin(*arguments)
        self.begun.put(write.slot_index)
        query, synchronize = (partial(self._ask, answer) for answer in (self.finished.is_set, self.finished.wait))
        event = SimpleNamespace(query=query, synchronize=synchronize)
        return dataclasses.replace(write, done=event)  # type: ignore[arg-type]


def test_a_pack_that_is_asked_for_while_the_device_computes_is_launched_behind_it(
    engine: SteppedTarget, terms: SubscriptionTerms
) -> None:
    """Trainers ask a moment after they were given a pack: the device must not stand still for that."""
    name, _ = engine.join(terms)
    device = BusyDevice()
    producer = Producer(engine.target, engine.queue, engine.catalog, device)
    producer._packs_in_flight = 1
    engine.ledger.lease(name, Ask(1, 1))
    running = threading.Thread(target=producer.run, daemon=True)
    running.start()
    device.begun.get(timeout=30)
    assert device.asked.wait(30), "the engine waits: for the device, or for work"
    engine.ledger.lease(name, Ask(1, 2))
    device.begun.get(timeout=30)
    device.finished.set()
    taken: list[int] = []
    while len(taken) < 2:
        grant = engine.ledger.lease(name, Ask(1, 2 - len(taken), max_wait=30.0))
        taken += [lease.sequence_number for lease in grant.leases]
    engine.queue.close()
    running.join(30)
    assert (taken, running.is_alive()) == ([0, 1], False)


def test_an_engine_of_a_closed_queue_does_not_spin_while_its_device_computes(
    engine: SteppedTarget, terms: SubscriptionTerms, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _ = engine.join(terms)
    device = BusyDevice()
    producer = Producer(engine.target, engine.queue, engine.catalog, device)
    producer._packs_in_flight = 1
    slept = threading.Event()
    monkeypatch.setattr("target_server.producer.time.sleep", lambda _seconds: slept.set())
    engine.ledger.lease(name, Ask(1, 1))
    running = threading.Thread(target=producer.run, daemon=True)
    running.start()
    device.begun.get(timeout=30)
    engine.queue.close()
    assert slept.wait(30)
    device.finished.set()
    running.join(30)
    assert not running.is_alive()


def test_a_failure_leaves_no_pack_that_was_launched_before(
    engine: SteppedTarget, terms: SubscriptionTerms, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, stream_name = engine.join(terms)
    engine.producer._packs_in_flight = 1
    original, calls = engine.target.capture, []

    def fail_later(*arguments: object) -> object:
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("device-side assert")
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.target, "capture", fail_later)
    engine.ledger.lease(name, Ask(1, 3))
    with pytest.raises(RuntimeError, match="device-side"):
        engine.producer.run()
    assert not engine.ledger._book.shelves[stream_name].is_writing


def test_throughput_counts_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("target_server.producer.time.monotonic", lambda: clock[0])
    throughput = Throughput()
    assert throughput.tokens_per_second("s") == 0.0
    for _ in range(5):
        throughput.note("s", 200)
        throughput.note("other", 1000)
        clock[0] += 0.5
    assert throughput.tokens_per_second("s") == pytest.approx(4 * 200 / 2.5)
    clock[0] += 60.0
    assert throughput.tokens_per_second("s") == 0.0
