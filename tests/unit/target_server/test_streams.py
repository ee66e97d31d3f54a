"""Streams on a real tiny target: identity, layers, the shelf's budget; and the engine that fills their slots."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.wire.arena import PayloadArena
from slipstream.wire.codec import checksum, view_tensor
from target_server.fixed_payloads import FixedPayloadStore, probe_tensor
from target_server.lease_book import DeliveryState, LeaseBook
from target_server.lease_ledger import Ask, LeaseLedger, SeekTo
from target_server.ledger_store import LedgerStore
from target_server.producer import Producer, Throughput
from target_server.readiness import Readiness
from target_server.served_target import ServedTarget
from target_server.service import HiddenStateService, _terms
from target_server.stream import SMALL_TENSORS, Stream
from target_server.stream_control import StreamControl
from target_server.stream_shelves import StreamShelves
from target_server.streams import MIN_SLOTS, StreamCatalog
from target_server.subscription import Lease, SubscriptionTerms
from target_server.target_model import TargetModel
from target_server.work_queue import WorkQueue
from tests.fakes.served_model import LAYERS, data_spec_json, write_conversations, write_tiny_target

BUDGET = 2**20
NAMES_OF_NO_FILE = [
    ("~nobody-of-that-name/x", "is not the path of a file"),
    ("x" * 5000, "cannot be read: File name too long"),
]


class Engine:
    """A catalog with its ledger, an engine that runs when told, and a clock that stands still."""

    def __init__(self, target: TargetModel, directory: Path, shelf_bytes: int = BUDGET) -> None:
        self.now = 0.0
        self.target = target
        self.store = LedgerStore(directory / "ledger.sqlite")
        self.book = book = LeaseBook(self.store, clock=lambda: self.now)
        self.ledger = LeaseLedger(book)
        self.control = StreamControl(book)
        self.queue = WorkQueue(book)
        self.catalog = StreamCatalog(
            target, StreamShelves(book), shelf_bytes=shelf_bytes, shm_dir=None, data_roots=None
        )
        self.producer = Producer(target, self.queue, self.catalog)

    def join(self, terms: SubscriptionTerms) -> tuple[str, str]:
        """Open and seek; returns the subscription and the stream."""
        stream = self.catalog.open(terms)
        record = self.ledger.open(terms, stream.name, self.target.fingerprint, stream.end(terms.max_epochs))
        self.ledger.seek(record.name, SeekTo(0, 0, record.incarnation))
        return record.name, stream.name

    def run(self, name: str, packs: int) -> None:
        """Ask for packs and let the engine compute them."""
        self.ledger.lease(name, Ask(1, packs))
        while (work := self.queue.next_work(0.0)) is not None:
            self.producer.compute(work)

    def close(self) -> None:
        self.catalog.close()
        self.store.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    directory = write_tiny_target(tmp_path_factory.mktemp("model"))
    return TargetModel.load(TargetSpec(model=str(directory), dtype="float32"), device="cpu")


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "conversations.jsonl", count=30)


@pytest.fixture
def engine(target: TargetModel, tmp_path: Path) -> Iterator[Engine]:
    made = Engine(target, tmp_path)
    yield made
    made.close()


@pytest.fixture
def terms(conversations: Path) -> SubscriptionTerms:
    return SubscriptionTerms("a", data_spec_json(conversations), LAYERS, True, 1, max_epochs=1)


def refused(call: Callable[[], object], words: str, reason: Reason) -> None:
    with pytest.raises(SlipstreamError, match=words) as caught:
        call()
    assert caught.value.reason is reason


def test_the_content_makes_the_stream_not_its_place(
    engine: Engine, terms: SubscriptionTerms, conversations: Path, tmp_path: Path
) -> None:
    copy = tmp_path / conversations.name
    copy.write_bytes(conversations.read_bytes())
    stream = engine.catalog.open(terms)
    assert engine.catalog.open(replace(terms, data_spec_json=data_spec_json(copy))) is stream
    other = engine.catalog.open(replace(terms, data_spec_json=data_spec_json(conversations, seed=1)))
    assert other.name != stream.name


def test_a_changed_file_is_another_stream(engine: Engine, terms: SubscriptionTerms, tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "mine.jsonl", count=30)
    mine = replace(terms, data_spec_json=data_spec_json(path))
    before = engine.catalog.open(mine)
    write_conversations(path, count=31)
    assert engine.catalog.open(mine).name != before.name


def test_what_the_engine_writes_is_what_the_target_gives(engine: Engine, terms: SubscriptionTerms) -> None:
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


def described(stream: Stream, lease: Lease, *, checksums: bool) -> batch_pb2.PackManifest:
    found = stream.describe(lease, checksums=checksums)
    assert found is not None
    return found[0]


def get(engine: Engine, name: str, packs: int) -> dict[int, dict[str, torch.Tensor]]:
    """What a trainer reads of the next packs."""
    found = {}
    for lease in engine.ledger.lease(name, Ask(1, packs)).leases:
        stream = engine.catalog.get(lease.stream)
        buffer = stream.payload(lease)
        assert buffer is not None
        specs = described(stream, lease, checksums=False).tensors
        found[lease.sequence_number] = {spec.name: view_tensor(buffer, spec).clone() for spec in specs}
        assert engine.ledger.confirm(lease.token, lease.facts.generation)
    return found


def test_runs_that_read_other_layers_share_one_pass_over_the_union(engine: Engine, terms: SubscriptionTerms) -> None:
    a, stream_name = engine.join(replace(terms, last_hidden_state=False))
    engine.run(a, packs=2)
    first = get(engine, a, 1)
    assert engine.catalog.get(stream_name).layer_ids == LAYERS
    b, other_name = engine.join(replace(terms, run="b", layer_ids=(1, 2)))
    assert other_name == stream_name
    stream = engine.catalog.get(stream_name)
    assert (stream.layer_ids, stream.last_hidden_state) == ((0, 1, 2), True)
    engine.run(b, packs=2)
    assert engine.control.counters(stream_name).packs_recomputed == 2, "packs 0 and 1 had lain there without layer 1"
    for_b, for_a = get(engine, b, 2), get(engine, a, 1)
    assert sorted(for_b) == [0, 1] and sorted(for_a) == [1], "one pass for both"
    for name, tensor in first[0].items():
        assert torch.equal(tensor, for_b[0][name]), f"{name} is the same beside other layers"
    for number, tensors in for_b.items():
        pack = stream.sequence.pack(number)
        expected = engine.target.capture(pack.token_ids, pack.document_lengths, (0, 1, 2), True)
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), name
    computed = engine.control.counters(stream_name).packs_computed
    engine.join(replace(terms, run="c", layer_ids=(1,), last_hidden_state=False))
    assert engine.catalog.get(stream_name) is stream, "everything that c reads is there"
    assert engine.control.counters(stream_name).packs_computed == computed


def test_leases_on_the_old_shelf_are_void_and_their_packs_delivered_again(
    engine: Engine, terms: SubscriptionTerms
) -> None:
    a, stream_name = engine.join(terms)
    engine.run(a, packs=1)
    (lease,) = engine.ledger.lease(a, Ask(1)).leases
    old = engine.catalog.get(stream_name)
    buffer = old.payload(lease)
    engine.join(replace(terms, run="b", layer_ids=(3,)))
    assert buffer is not None and buffer.any(), "a read that is under way keeps its memory"
    assert old.payload(lease) is None and old.describe(lease, checksums=True) is None
    assert not engine.ledger.confirm(lease.token, lease.facts.generation)
    engine.run(a, packs=1)
    (again,) = engine.ledger.lease(a, Ask(1)).leases
    assert (again.sequence_number, again.attempt) == (0, 2)


def test_a_stream_nobody_uses_takes_the_layers_of_the_next_run_alone(engine: Engine, terms: SubscriptionTerms) -> None:
    _, name = engine.join(terms)
    engine.now += 31.0
    others = replace(terms, run="b", layer_ids=(1, 3), last_hidden_state=False)
    assert engine.catalog.open(others).layer_ids == (1, 3)
    assert not engine.catalog.serves(*engine.ledger.wanted_by("subscriptions/a")), "it is widened once a comes back"
    engine.join(others)
    engine.catalog.open(terms)
    assert engine.catalog.get(name).layer_ids == (0, 1, 2, 3)


def test_a_layer_that_does_not_fit_is_refused_and_the_others_go_on(
    target: TargetModel, terms: SubscriptionTerms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(target, tmp_path, shelf_bytes=MIN_SLOTS * engine_slot_bytes(target, terms, tmp_path / "probe"))
    a, stream_name = engine.join(terms)
    engine.run(a, packs=1)
    wider = replace(terms, run="b", layer_ids=(0, 1, 2, 3))
    refused(lambda: engine.catalog.open(wider), "The shelf has .* at least 4", Reason.OUT_OF_MEMORY)
    assert list(get(engine, a, 1)) == [0], "nothing was thrown away"

    create = PayloadArena.create
    full = SlipstreamError("full", reason=Reason.ENVIRONMENT_UNSUPPORTED)

    def create_once(slots: int, slot_bytes: int, *, directory: Path | None) -> PayloadArena:
        if slot_bytes > before.layout.size_bytes:
            raise full
        return create(slots, slot_bytes, directory=directory)

    before = engine.catalog.get(stream_name)
    monkeypatch.setattr(engine.catalog, "_shelf_bytes", 2**30)
    monkeypatch.setattr("target_server.streams.PayloadArena.create", create_once)
    refused(lambda: engine.catalog.open(wider), "full", Reason.ENVIRONMENT_UNSUPPORTED)
    engine.run(a, packs=1)
    assert list(get(engine, a, 1)) == [1], "on a shelf as it was before"
    engine.close()


def test_a_pack_in_work_is_waited_for_before_its_slot_goes(engine: Engine, terms: SubscriptionTerms) -> None:
    a, stream_name = engine.join(terms)
    engine.ledger.lease(a, Ask(1))
    work = engine.queue.next_work(0.0)
    assert work is not None
    old = engine.catalog.get(stream_name)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(engine.catalog.open, replace(terms, run="b", layer_ids=(3,)))
        with engine.book.lock:
            assert engine.book.work.wait_for(lambda: stream_name in engine.book.held_streams, timeout=30)
        assert not old.arena.is_closed and engine.queue.next_work(0.0) is None
        engine.producer.compute(work)
        assert opening.result(timeout=30).layer_ids == (0, 2, 3)
    assert old.arena.is_closed
    engine.run(a, packs=1)
    assert list(get(engine, a, 1)) == [0]


def test_a_pack_that_never_ends_refuses_the_layer_for_now(
    engine: Engine, terms: SubscriptionTerms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("target_server.stream_shelves.PATIENCE_SECONDS", 0.01)
    a, _ = engine.join(terms)
    engine.ledger.lease(a, Ask(1))
    work = engine.queue.next_work(0.0)
    assert work is not None
    refused(
        lambda: engine.catalog.open(replace(terms, run="b", layer_ids=(3,))), "has been in work", Reason.TARGET_LOADING
    )
    engine.producer.compute(work)
    assert list(get(engine, a, 1)) == [0]


def test_a_stream_that_does_not_fit_is_refused_with_sizes(
    target: TargetModel, terms: SubscriptionTerms, conversations: Path, tmp_path: Path
) -> None:
    slot = engine_slot_bytes(target, terms, tmp_path / "probe")
    engine = Engine(target, tmp_path, shelf_bytes=(2 * MIN_SLOTS - 1) * slot)
    engine.join(terms)
    other = replace(terms, run="b", data_spec_json=data_spec_json(conversations, seed=1))
    refused(
        lambda: engine.catalog.open(other),
        r"The shelf has .* MiB, of which 1 other .* at least 4",
        Reason.OUT_OF_MEMORY,
    )
    engine.now += 31.0
    name, _ = engine.join(other)
    engine.run(name, packs=1)
    assert engine.ledger.lease(name, Ask(1)).leases, "the idle stream made room"
    assert not engine.catalog.serves(*engine.ledger.wanted_by("subscriptions/a"))
    engine.close()


def engine_slot_bytes(target: TargetModel, terms: SubscriptionTerms, directory: Path) -> int:
    directory.mkdir()
    engine = Engine(target, directory)
    size = engine.catalog.open(terms).arena.slot_bytes
    engine.close()
    return size


def test_what_cannot_be_served_is_refused_in_words(
    engine: Engine, terms: SubscriptionTerms, conversations: Path, tmp_path: Path
) -> None:
    def open_with(**changes: object) -> Callable[[], object]:
        return lambda: engine.catalog.open(replace(terms, **changes))  # type: ignore[arg-type]

    refused(open_with(layer_ids=(0, 4)), r"Layers \[4\].*layers 0 to 3", Reason.TARGET_INCOMPATIBLE)
    refused(open_with(layer_ids=(), last_hidden_state=False), "no layer", Reason.SPEC_INVALID)
    refused(open_with(data_spec_json="{"), "not valid", Reason.SPEC_INVALID)
    refused(
        open_with(data_spec_json=json.dumps({"files": ["x"], "pack_tokens": 5})),
        "data.pack_tokens",
        Reason.SPEC_INVALID,
    )
    refused(open_with(data_spec_json=data_spec_json(tmp_path / "none.jsonl")), "does not exist", Reason.DATA_INVALID)
    for name, words in NAMES_OF_NO_FILE:
        spec = json.dumps({"files": [name], "pack_tokens": 128})
        refused(open_with(data_spec_json=spec), words, Reason.DATA_INVALID)


def test_a_document_beyond_the_targets_positions_is_refused_when_the_stream_opens(
    engine: Engine, terms: SubscriptionTerms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.target, "max_document_tokens", 10)
    refused(lambda: engine.catalog.open(terms), "only right up to 10", Reason.DATA_INVALID)


def test_hidden_states_that_are_not_finite_are_quarantined(
    tmp_path: Path, terms: SubscriptionTerms, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_tiny_target(tmp_path / "broken")
    target = TargetModel.load(TargetSpec(model=str(directory), dtype="float32"), device="cpu")
    engine = Engine(target, tmp_path)
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


def test_a_pack_that_readers_reject_twice_is_named_in_the_log(
    engine: Engine, terms: SubscriptionTerms, caplog: pytest.LogCaptureFixture
) -> None:
    name, stream_name = engine.join(terms)
    fixed = FixedPayloadStore(None)
    readiness = Readiness("m")
    served = ServedTarget(engine.target.fingerprint, pb.GetTargetResponse(), engine.catalog, engine.producer, fixed)
    readiness.serve(served)
    service = HiddenStateService(engine.ledger, readiness, max_polls=1)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert "pack_quarantined" not in caplog.text
            engine.run(name, packs=1)
            (lease,) = engine.ledger.lease(name, Ask(1)).leases
            request = pb.ReleaseLeasesRequest(lease_tokens=[lease.token], reason=pb.RELEASE_REASON_PACK_CORRUPT)
            service.ReleaseLeases(request, None)  # type: ignore[arg-type]
    pack = engine.catalog.get(stream_name).sequence.pack(0)
    (record,) = [each for each in caplog.records if each.message == "pack_quarantined"]
    fields = getattr(record, "slipstream_fields", {})
    assert (fields["documents"], fields["why"]) == (pack.document_names, "RELEASE_REASON_PACK_CORRUPT")


def test_polls_do_not_pile_up_behind_data_that_are_being_read(engine: Engine, terms: SubscriptionTerms) -> None:
    """A trainer asks again every few seconds; each poll that waited here would keep a thread of the server's."""
    name, stream_name = engine.join(terms)
    engine.now += 31.0
    assert engine.catalog._shelves.retire(stream_name)
    engine.catalog._drop(stream_name)
    readiness = Readiness("m")
    fixed = FixedPayloadStore(None)
    served = ServedTarget(engine.target.fingerprint, pb.GetTargetResponse(), engine.catalog, engine.producer, fixed)
    readiness.serve(served)
    service = HiddenStateService(engine.ledger, readiness, max_polls=1)
    request = pb.LeasePacksRequest(subscription=name, incarnation=1, target_fingerprint=engine.target.fingerprint)
    with engine.catalog._opening:  # as whoever reads them
        refused(lambda: service.LeasePacks(request, None), "reads the data", Reason.TARGET_LOADING)  # type: ignore[arg-type]
    assert engine.catalog.open(terms, wait=False).name == stream_name


def test_an_engine_that_fails_leaves_no_half_written_pack(
    engine: Engine, terms: SubscriptionTerms, monkeypatch: pytest.MonkeyPatch
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
    engine: Engine, terms: SubscriptionTerms, caplog: pytest.LogCaptureFixture
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


def test_a_failure_leaves_no_pack_that_was_launched_before(
    engine: Engine, terms: SubscriptionTerms, monkeypatch: pytest.MonkeyPatch
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


def test_fixed_payloads_never_change() -> None:
    store = FixedPayloadStore(None)
    payload = store.add("probe", {"probe": probe_tensor(4096)})
    found = store.find(payload.token)
    assert found is not None
    assert torch.equal(view_tensor(found, payload.manifest.tensors[0]), probe_tensor(4096))
    assert payload.manifest.tensors[0].crc32c == checksum(found)
    assert store.find(b"fixed/other") is None
    store.close()


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


@pytest.mark.parametrize("run", ["", "runs/", "a", "runs/A", "runs/a/b", "runs/" + "a" * 64, "runs/-a"])
def test_names_that_are_none(run: str) -> None:
    request = pb.OpenSubscriptionRequest(run=run, packs_per_step=1)
    refused(lambda: _terms(request), "not the name of a run", Reason.SPEC_INVALID)


def test_layers_are_sorted_and_a_group_needs_its_start() -> None:
    request = pb.OpenSubscriptionRequest(
        run="runs/a", packs_per_step=2, layer_ids=[3, 1, 3], group="x", group_size=2, max_epochs=3
    )
    terms = _terms(request)
    assert (terms.layer_ids, terms.group, terms.group_size) == ((1, 3), "", 0)
    refused(lambda: _terms(pb.OpenSubscriptionRequest(run="runs/a")), "packs_per_step is 0", Reason.SPEC_INVALID)
