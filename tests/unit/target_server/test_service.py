"""Requests as they come over the wire: who leaves, and what is refused before the ledger sees it."""

from collections.abc import Callable

import pytest

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import MAX_EPOCHS
from target_server.fixed_payloads import FixedPayloadStore
from target_server.lease_ledger import Ask
from target_server.readiness import Readiness
from target_server.served_target import ServedTarget
from target_server.service import HiddenStateService, _terms
from target_server.subscription import SubscriptionTerms
from tests.fakes.ledger_desk import LedgerDesk
from tests.fakes.stepped_target import SteppedTarget


def refused(call: Callable[[], object], words: str, reason: Reason) -> None:
    with pytest.raises(SlipstreamError, match=words) as caught:
        call()
    assert caught.value.reason is reason


def release(desk: LedgerDesk, **fields: object) -> None:
    service = HiddenStateService(desk.ledger, Readiness("m"), max_polls=1)
    service.ReleaseLeases(pb.ReleaseLeasesRequest(**fields), None)  # type: ignore[arg-type]


def service_of(engine: SteppedTarget) -> HiddenStateService:
    readiness = Readiness("m")
    fixed = FixedPayloadStore(None)
    served = ServedTarget(engine.target.fingerprint, pb.GetTargetResponse(), engine.catalog, engine.producer, fixed)
    readiness.serve(served)
    return HiddenStateService(engine.ledger, readiness, max_polls=1)


@pytest.mark.parametrize(
    ("reason", "leaves"),
    [
        (pb.RELEASE_REASON_SHUTDOWN, True),
        (pb.RELEASE_REASON_PAUSE, True),
        (pb.RELEASE_REASON_UNSPECIFIED, False),
        (pb.RELEASE_REASON_PACK_CORRUPT, False),
        (pb.RELEASE_REASON_PACK_NOT_FINITE, False),
    ],
)
def test_a_run_without_leases_leaves_when_it_says_so(desk: LedgerDesk, reason: pb.ReleaseReason, leaves: bool) -> None:
    name, incarnation = desk.join("a")
    release(desk, reason=reason, subscription=name, incarnation=incarnation)
    subscription = desk.book.subscriptions[name]
    assert desk.book.present(subscription) is not leaves
    desk.ask(name, incarnation)
    assert desk.book.present(subscription), "any call heals it"


def test_an_older_incarnation_cannot_make_a_run_leave(desk: LedgerDesk) -> None:
    name, older = desk.join("a")
    desk.seek(name, 0)
    with pytest.raises(SlipstreamError) as caught:
        release(desk, reason=pb.RELEASE_REASON_SHUTDOWN, subscription=name, incarnation=older)
    assert caught.value.reason is Reason.INCARNATION_STALE
    assert desk.book.present(desk.book.subscriptions[name])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"start_position": 17}, "no start position 17"),
        ({"max_epochs": MAX_EPOCHS + 1}, f"0 to {MAX_EPOCHS}"),
        ({"max_epochs": -1}, "max_epochs -1"),
    ],
)
def test_terms_that_are_none(fields: dict[str, int], words: str) -> None:
    with pytest.raises(SlipstreamError, match=words) as caught:
        _terms(pb.OpenSubscriptionRequest(run="runs/a", packs_per_step=1, **fields))  # type: ignore[arg-type]
    assert caught.value.reason is Reason.SPEC_INVALID


def test_polls_do_not_pile_up_behind_data_that_are_being_read(engine: SteppedTarget, terms: SubscriptionTerms) -> None:
    """A trainer asks again every few seconds; each poll that waited here would keep a thread of the server's."""
    name, stream_name = engine.join(terms)
    engine.now += 31.0
    assert engine.catalog._shelves.retire(stream_name)
    engine.catalog._drop(stream_name)
    service = service_of(engine)
    request = pb.LeasePacksRequest(subscription=name, incarnation=1, target_fingerprint=engine.target.fingerprint)
    with engine.catalog._opening:  # as whoever reads them
        refused(lambda: service.LeasePacks(request, None), "reads the data", Reason.TARGET_LOADING)  # type: ignore[arg-type]
    assert engine.catalog.open(terms, wait=False).name == stream_name


def test_a_pack_that_readers_reject_twice_is_named_in_the_log(
    engine: SteppedTarget, terms: SubscriptionTerms, caplog: pytest.LogCaptureFixture
) -> None:
    name, stream_name = engine.join(terms)
    service = service_of(engine)
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
