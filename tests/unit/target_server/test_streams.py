"""Streams on a real tiny target: identity, layers, the shelf's budget."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.arena import PayloadArena
from slipstream.wire.codec import checksum, view_tensor
from target_server.fixed_payloads import FixedPayloadStore, probe_tensor
from target_server.lease_ledger import Ask
from target_server.streams import MIN_SLOTS
from target_server.subscription import SubscriptionTerms
from target_server.target_model import TargetModel
from tests.fakes.served_model import LAYERS, data_spec_json, write_conversations
from tests.fakes.stepped_target import SteppedTarget

BUDGET = 2**20
NAMES_OF_NO_FILE = [
    ("~nobody-of-that-name/x", "is not the path of a file"),
    ("x" * 5000, "cannot be read: File name too long"),
]


def refused(call: Callable[[], object], words: str, reason: Reason) -> None:
    with pytest.raises(SlipstreamError, match=words) as caught:
        call()
    assert caught.value.reason is reason


def test_the_content_makes_the_stream_not_its_place(
    engine: SteppedTarget, terms: SubscriptionTerms, conversations: Path, tmp_path: Path
) -> None:
    copy = tmp_path / conversations.name
    copy.write_bytes(conversations.read_bytes())
    stream = engine.catalog.open(terms)
    assert engine.catalog.open(replace(terms, data_spec_json=data_spec_json(copy))) is stream
    other = engine.catalog.open(replace(terms, data_spec_json=data_spec_json(conversations, seed=1)))
    assert other.name != stream.name


def test_a_changed_file_is_another_stream(engine: SteppedTarget, terms: SubscriptionTerms, tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "mine.jsonl", count=30)
    mine = replace(terms, data_spec_json=data_spec_json(path))
    before = engine.catalog.open(mine)
    write_conversations(path, count=31)
    assert engine.catalog.open(mine).name != before.name


def get(engine: SteppedTarget, name: str, packs: int) -> dict[int, dict[str, torch.Tensor]]:
    """What a trainer reads of the next packs."""
    found = {}
    for lease in engine.ledger.lease(name, Ask(1, packs)).leases:
        stream = engine.catalog.get(lease.stream)
        buffer = stream.payload(lease)
        description = stream.describe(lease, checksums=False)
        assert buffer is not None and description is not None
        specs = description[0].tensors
        found[lease.sequence_number] = {spec.name: view_tensor(buffer, spec).clone() for spec in specs}
        assert engine.ledger.confirm(lease.token, lease.facts.generation)
    return found


def test_runs_that_read_other_layers_share_one_pass_over_the_union(
    engine: SteppedTarget, terms: SubscriptionTerms
) -> None:
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
    engine: SteppedTarget, terms: SubscriptionTerms
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


def test_a_stream_nobody_uses_takes_the_layers_of_the_next_run_alone(
    engine: SteppedTarget, terms: SubscriptionTerms
) -> None:
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
    engine = SteppedTarget(
        target, tmp_path / "ledger.sqlite", shelf_bytes=MIN_SLOTS * engine_slot_bytes(target, terms, tmp_path / "probe")
    )
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


def test_a_pack_in_work_is_waited_for_before_its_slot_goes(engine: SteppedTarget, terms: SubscriptionTerms) -> None:
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
    engine: SteppedTarget, terms: SubscriptionTerms, monkeypatch: pytest.MonkeyPatch
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
    engine = SteppedTarget(target, tmp_path / "ledger.sqlite", shelf_bytes=(2 * MIN_SLOTS - 1) * slot)
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
    engine = SteppedTarget(target, directory / "ledger.sqlite")
    size = engine.catalog.open(terms).arena.slot_bytes
    engine.close()
    return size


def test_what_cannot_be_served_is_refused_in_words(
    engine: SteppedTarget, terms: SubscriptionTerms, conversations: Path, tmp_path: Path
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
    engine: SteppedTarget, terms: SubscriptionTerms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.target, "max_document_tokens", 10)
    refused(lambda: engine.catalog.open(terms), "only right up to 10", Reason.DATA_INVALID)


def test_fixed_payloads_never_change() -> None:
    store = FixedPayloadStore(None)
    payload = store.add("probe", {"probe": probe_tensor(4096)})
    found = store.find(payload.token)
    assert found is not None
    assert torch.equal(view_tensor(found, payload.manifest.tensors[0]), probe_tensor(4096))
    assert payload.manifest.tensors[0].crc32c == checksum(found)
    assert store.find(b"fixed/other") is None
    store.close()
