"""An engine with a cache: what was computed once, in any packing, is not computed again."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.wire.codec import ByteArray
from target_server.lease_ledger import Ask, SeekTo
from target_server.producer import Producer
from target_server.state_cache import StateCache, describe_cached
from target_server.state_cache_queue import CachedQueue
from target_server.state_cache_store import StateStore
from target_server.subscription import SubscriptionTerms
from target_server.target_model import TargetModel
from target_server.work_queue import WorkQueue
from tests.fakes.served_model import LAYERS, data_spec_json
from tests.fakes.stepped_target import SteppedTarget

BUDGET = 64 * 2**20


class CachedTarget(SteppedTarget):
    """Its engine has a cache, if one is named."""

    def __init__(self, target: TargetModel, directory: Path, cache_directory: Path | None) -> None:
        directory.mkdir()
        super().__init__(target, directory / "ledger.sqlite", shelf_bytes=2**22)
        self.cache = None
        self.assignments: WorkQueue | CachedQueue = self.queue
        if cache_directory is not None:
            self.cache = StateCache(StateStore(cache_directory, BUDGET), describe_cached(target))
            self.assignments = CachedQueue(self.queue, self.catalog, self.cache)
        self.producer = Producer(target, self.assignments, self.catalog)
        if isinstance(self.assignments, CachedQueue):
            self.assignments.throughput = self.producer.throughput

    def payloads(self, terms: SubscriptionTerms) -> list[ByteArray]:
        """Every pack of a run, in order, as a trainer reads it."""
        stream = self.catalog.open(terms)
        record = self.ledger.open(terms, stream.name, self.target.fingerprint, stream.end(terms.max_epochs))
        incarnation = self.ledger.seek(record.name, SeekTo(0, 0, record.incarnation))
        end = stream.end(terms.max_epochs)
        payloads: list[ByteArray] = []
        assert end is not None
        while len(payloads) < end:
            grant = self.ledger.lease(record.name, Ask(incarnation, 1))
            for lease in grant.leases:
                payloads.append(stream.arena.slot(lease.slot.index)[: stream.layout.size_bytes].copy())
                assert self.ledger.confirm(lease.token, stream.arena.generation(lease.slot.index))
            while not grant.leases and (work := self.assignments.next_work(0.0)) is not None:
                self.producer.compute(work)
            if self.cache is not None:
                assert self.cache.writer.wait_until_written(30)
        return payloads

    def close(self) -> None:
        super().close()
        if self.cache is not None:
            self.cache.close()


@pytest.fixture
def tokens_computed(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every forward."""
    counts: list[int] = []
    capture = target.capture

    def counted(token_ids: object, lengths: Sequence[int], *rest: object) -> object:
        counts.append(sum(lengths))
        return capture(token_ids, lengths, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "capture", counted)
    return counts


def test_later_epochs_other_seeds_and_other_packings_do_not_run_the_target(
    target: TargetModel, conversations: Path, tmp_path: Path, tokens_computed: list[int]
) -> None:
    terms = SubscriptionTerms("a", data_spec_json(conversations), LAYERS, True, 1, max_epochs=3)
    plain = CachedTarget(target, tmp_path / "plain", None)
    expected = plain.payloads(terms)
    uncached = sum(tokens_computed)
    plain.close()
    tokens_computed.clear()

    engine = CachedTarget(target, tmp_path / "first", tmp_path / "cache")
    got = engine.payloads(terms)
    epoch = sum(tokens_computed)
    assert uncached == 3 * epoch
    assert_equal_but_for_rounding(got, expected)
    tokens_computed.clear()
    engine.payloads(replace(terms, run="b", data_spec_json=data_spec_json(conversations, seed=5, pack_tokens=256)))
    assert not tokens_computed
    engine.close()

    later = CachedTarget(target, tmp_path / "later", tmp_path / "cache")
    assert_equal_but_for_rounding(later.payloads(terms), expected)
    assert not tokens_computed, "the next server finds it all"
    later.close()


def test_of_new_documents_only_these_are_computed(
    target: TargetModel, conversations: Path, tmp_path: Path, tokens_computed: list[int]
) -> None:
    some = tmp_path / "some.jsonl"
    some.write_text("".join(conversations.read_text().splitlines(keepends=True)[:20]))
    engine = CachedTarget(target, tmp_path / "engine", tmp_path / "cache")
    terms = SubscriptionTerms("a", data_spec_json(some), LAYERS, True, 1, max_epochs=1)
    engine.payloads(terms)
    few = sum(tokens_computed)
    more = replace(terms, run="b", data_spec_json=data_spec_json(conversations))
    got = engine.payloads(more)
    engine.close()
    both = sum(tokens_computed)
    tokens_computed.clear()
    plain = CachedTarget(target, tmp_path / "plain", None)
    assert_equal_but_for_rounding(got, plain.payloads(more))
    plain.close()
    assert both == sum(tokens_computed) > few


def assert_equal_but_for_rounding(ours: Sequence[ByteArray], theirs: Sequence[ByteArray]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        exact = 13 * 128  # what the pack itself says: ids, mask, documents, positions
        assert np.array_equal(one[:exact], other[:exact])
        np.testing.assert_allclose(one[exact:].view(np.float32), other[exact:].view(np.float32), rtol=1e-4, atol=1e-5)
