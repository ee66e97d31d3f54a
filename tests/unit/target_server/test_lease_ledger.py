"""The trainer's verbs, one subscription at a time: cursor and leases."""

import pytest

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.lease_book import DeliveryState
from tests.fakes.ledger_desk import STREAM, LedgerDesk


def refused(reason: Reason) -> pytest.RaisesExc[SlipstreamError]:
    return pytest.RaisesExc(SlipstreamError, check=lambda error: error.reason is reason)


def test_packs_are_delivered_in_order_and_computed_on_demand_only(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    assert desk.work() == []
    assert [desk.get(name, incarnation) for _ in range(3)] == [[0], [1], [2]]
    assert desk.computed == [0, 1, 2]


def test_what_was_asked_for_but_not_granted_is_computed_meanwhile(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    assert desk.ask(name, incarnation, packs=3).leases == ()
    assert desk.work(1) == [0]
    assert len(desk.ask(name, incarnation, packs=3).leases) == 1
    assert desk.work() == [1, 2]


def test_the_shelf_bounds_what_is_computed(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation, packs=50)
    assert desk.work() == [0, 1, 2, 3]
    assert desk.get(name, incarnation) == [0]
    assert desk.work() == [4]


def test_nothing_is_leased_before_a_seek(desk: LedgerDesk) -> None:
    name = desk.open("a")
    with refused(Reason.INCARNATION_STALE):
        desk.ask(name, 0)


def test_unknown_subscription(desk: LedgerDesk) -> None:
    with refused(Reason.SUBSCRIPTION_UNKNOWN):
        desk.ask("subscriptions/nobody", 1)


def test_a_pack_is_leased_to_one_trainer_at_a_time(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation, packs=2)
    desk.work()
    first = desk.ask(name, incarnation)
    second = desk.ask(name, incarnation)
    assert [lease.sequence_number for lease in (*first.leases, *second.leases)] == [0, 1]


def test_an_expired_lease_is_delivered_again_first(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation, packs=2)
    desk.work()
    (lost,) = desk.ask(name, incarnation, time_to_live=5.0).leases
    desk.pass_time(5.0)
    again, other = desk.ask(name, incarnation, packs=2).leases
    assert (again.sequence_number, again.attempt, other.sequence_number) == (0, 2, 1)
    assert not desk.ledger.confirm(lost.token, lost.facts.generation)
    with refused(Reason.LEASE_LOST):
        desk.ledger.reading(lost.token)
    assert desk.ledger.confirm(again.token, again.facts.generation)
    assert desk.computed == [0, 1]
    assert desk.control.counters(STREAM).subscriptions[0].leases_expired == 1


def test_renewal_keeps_a_lease(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation)
    desk.work()
    (lease,) = desk.ask(name, incarnation, time_to_live=5.0).leases
    desk.pass_time(4.0)
    assert desk.ledger.renew([lease.token], 5.0) == ([], DeliveryState.ACTIVE)
    desk.pass_time(4.0)
    assert desk.ledger.confirm(lease.token, lease.facts.generation)
    assert desk.ledger.renew([lease.token], 5.0) == ([lease.token], None)


def test_another_generation_is_not_what_was_leased(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation)
    desk.work()
    (lease,) = desk.ask(name, incarnation).leases
    assert not desk.ledger.confirm(lease.token, lease.facts.generation + 2)
    (again,) = desk.ask(name, incarnation).leases
    assert (again.sequence_number, again.attempt) == (0, 2)
    assert desk.ledger.confirm(again.token, 0), "a transport without generations"


def test_an_orderly_leave_returns_leases_at_once(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation)
    desk.work()
    (lease,) = desk.ask(name, incarnation).leases
    desk.ledger.release([lease.token, b"of/1/2/another"], pack_at_fault=False)
    assert desk.get(name, incarnation) == [0]
    assert desk.computed == [0]


def test_what_was_released_before_a_refused_token_is_told(desk: LedgerDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    name, incarnation = desk.join("a")
    other, older = desk.join("b")
    for each in ((name, incarnation), (other, older)):
        desk.ask(*each)
    desk.work()
    (mine,) = desk.ask(name, incarnation).leases
    (void,) = desk.ask(other, older).leases
    desk.seek(other, 0)
    told: list[bool] = []
    monkeypatch.setattr(desk.book, "changed", lambda: told.append(True))
    with refused(Reason.INCARNATION_STALE):
        desk.ledger.release([mine.token, void.token], pack_at_fault=False)
    assert told and desk.get(name, incarnation) == [0]


def test_a_pack_at_fault_is_computed_again_then_quarantined(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a", packs_per_step=2)
    for attempt in (1, 2):
        desk.ask(name, incarnation)
        desk.work()
        (lease,) = desk.ask(name, incarnation).leases
        assert (lease.sequence_number, lease.attempt) == (0, attempt)
        quarantined = desk.ledger.release([lease.token], pack_at_fault=True)
        assert quarantined == ([] if attempt == 1 else [lease])
    grant = desk.ask(name, incarnation)
    assert grant.quarantined == (0,)
    assert desk.get(name, incarnation) == [1]
    assert desk.ledger.commit(name, incarnation, 0) == [0]
    assert desk.ask(name, incarnation).quarantined == (), "it lies behind the cursor"
    assert desk.shelf.packs_recomputed == 1


def test_too_many_unconfirmed_leases(desk: LedgerDesk) -> None:
    desk.book.limits = type(desk.book.limits)(max_outstanding=2)
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation, packs=4)
    desk.work()
    leases = desk.ask(name, incarnation, packs=4).leases
    assert len(leases) == 2
    with refused(Reason.LEASE_QUOTA_EXCEEDED):
        desk.ask(name, incarnation)
    desk.ledger.confirm(leases[0].token, 0)
    assert len(desk.ask(name, incarnation).leases) == 1


@pytest.mark.parametrize("num_packs, delivered", [(6, 6), (7, 6), (1, 0)])
def test_a_trailing_partial_step_is_never_delivered(make_desk, num_packs: int, delivered: int) -> None:
    desk = make_desk(num_packs=num_packs)
    name, incarnation = desk.join("a", packs_per_step=2)
    got = [desk.get(name, incarnation) for _ in range(delivered)]
    assert got == [[number] for number in range(delivered)]
    assert desk.ask(name, incarnation).state is DeliveryState.EXHAUSTED
    assert desk.work() == []


def test_not_exhausted_while_a_lease_may_come_back(make_desk) -> None:
    desk = make_desk(num_packs=1)
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation)
    desk.work()
    (lease,) = desk.ask(name, incarnation).leases
    assert desk.ask(name, incarnation).state is DeliveryState.ACTIVE
    desk.ledger.confirm(lease.token, 0)
    assert desk.ask(name, incarnation).state is DeliveryState.EXHAUSTED
