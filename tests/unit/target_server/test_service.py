"""Requests as they come over the wire: who leaves, and what is refused before the ledger sees it."""

import pytest

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from target_server.readiness import Readiness
from target_server.service import HiddenStateService, _terms
from target_server.streams import MAX_EPOCHS
from tests.fakes.ledger_desk import LedgerDesk


def release(desk: LedgerDesk, **fields: object) -> None:
    service = HiddenStateService(desk.ledger, Readiness("m"), max_polls=1)
    service.ReleaseLeases(pb.ReleaseLeasesRequest(**fields), None)  # type: ignore[arg-type]


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
