"""Several subscriptions on one stream: groups, convoys, what stays on the shelf and what gives way."""

import pytest

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.lease_book import DeliveryState
from target_server.subscription import Start
from tests.fakes.ledger_desk import FINGERPRINT, STREAM, LedgerDesk, terms


def test_a_group_starts_when_all_are_there(desk: LedgerDesk) -> None:
    a, one = desk.join("a", group="sweep", group_size=2)
    assert desk.ask(a, one).state is DeliveryState.WAITING_FOR_GROUP
    assert desk.work() == []
    b, other = desk.join("b", group="sweep", group_size=2)
    assert desk.get(a, one) == [0]
    assert desk.get(b, other) == [0]
    assert desk.computed == [0]


def test_a_member_that_left_long_ago_does_not_complete_a_group(desk: LedgerDesk) -> None:
    desk.join("a", group="sweep", group_size=2)
    desk.pass_time(31.0)
    b, incarnation = desk.join("b", group="sweep", group_size=2)
    assert desk.ask(b, incarnation).state is DeliveryState.WAITING_FOR_GROUP
    desk.open("a", group="sweep", group_size=2)
    assert desk.ask(b, incarnation).state is DeliveryState.ACTIVE


def test_a_member_that_waits_for_its_group_holds_nobody_up(make_desk) -> None:
    desk = make_desk(num_slots=4, num_packs=20)
    waiting, one = desk.join("waiting", group="sweep", group_size=2)
    assert desk.ask(waiting, one).state is DeliveryState.WAITING_FOR_GROUP
    alone = desk.join("alone")
    assert [desk.get(*alone) for _ in range(8)] == [[number] for number in range(8)]
    desk.join("late", group="sweep", group_size=2)
    assert desk.get(waiting, one) == [0], "once the group is complete its needs count"


def test_a_group_that_started_stays_started(desk: LedgerDesk) -> None:
    a, _ = desk.join("a", group="sweep", group_size=2)
    desk.join("b", group="sweep", group_size=2)
    assert desk.ask(a, 1).state is DeliveryState.ACTIVE
    desk.pass_time(31.0)
    assert desk.get(a, desk.seek(a, 0)) == [0], "its partner is gone, the run goes on alone"


@pytest.mark.parametrize("stream, size", [(STREAM, 3), ("streams/other", 2)])
def test_a_group_has_one_size_and_one_stream(desk: LedgerDesk, stream: str, size: int) -> None:
    desk.join("a", group="sweep", group_size=2)
    with pytest.raises(SlipstreamError, match="Group 'sweep'") as caught:
        desk.ledger.open(terms("b", group="sweep", group_size=size), stream, FINGERPRINT, 100)
    assert caught.value.reason is Reason.SPEC_INVALID


def test_two_runs_at_one_pace_share_every_pack(make_desk) -> None:
    desk = make_desk(num_slots=4, num_packs=20)
    a, b = (desk.join(run, group="sweep", group_size=2) for run in "ab")
    for number in range(20):
        assert desk.get(*a) == [number]
        assert desk.get(*b) == [number]
    counters = desk.control.counters(STREAM)
    assert (counters.packs_computed, counters.packs_recomputed) == (20, 0)


def test_the_faster_of_a_group_waits_for_the_slower(make_desk) -> None:
    desk = make_desk(num_slots=4, num_packs=20)
    a, b = (desk.join(run, group="sweep", group_size=2) for run in "ab")
    fast = [number for _ in range(10) for number in desk.get(*a)]
    assert fast == [0, 1, 2, 3], "the shelf is full of packs that b needs"
    assert desk.get(*b) == [0]
    assert desk.get(*a) == [4]
    while got := desk.get(*b):
        fast += desk.get(*a)
    assert got == []
    counters = desk.control.counters(STREAM)
    assert (counters.packs_computed, counters.packs_recomputed) == (20, 0)


@pytest.mark.parametrize("silence", ["away", "left", "paused", "closed"])
def test_a_run_that_is_not_active_pins_nothing(make_desk, silence: str) -> None:
    desk = make_desk(num_slots=4, num_packs=20)
    a = desk.join("a")
    b = desk.join("b")
    assert [desk.get(*a) for _ in range(5)] == [[0], [1], [2], [3], []]
    if silence == "away":
        desk.pass_time(31.0)
    elif silence == "left":
        desk.ledger.leave(*b)
    elif silence == "paused":
        desk.control.pause(b[0])
    else:
        desk.control.close(b[0])
    assert desk.get(*a) == [4]
    assert desk.shelf.packs_recomputed == 0


def test_a_run_far_behind_is_served_by_computing_again(make_desk) -> None:
    desk = make_desk(num_slots=4)
    a = desk.join("a")
    for number in range(20):
        assert desk.get(*a) == [number]
    b = desk.join("b")
    for number in range(10):
        assert desk.get(*b) == [number]
        assert desk.get(*a) == [20 + number]
    counters = desk.control.counters(STREAM)
    assert counters.packs_computed == 40
    assert counters.packs_recomputed == 10


def test_every_one_of_two_far_runs_has_two_slots(make_desk) -> None:
    desk = make_desk(num_slots=4)
    a = desk.join("a", next_step=50)
    desk.ask(*a, packs=10)
    assert desk.work() == [50, 51, 52, 53]
    b = desk.join("b")
    desk.ask(*b, packs=10)
    assert desk.work() == [0, 1], "the packs that a needs latest gave way"
    assert {slot.sequence_number for slot in desk.shelf.slots} == {50, 51, 0, 1}


def test_convoys_take_turns(make_desk) -> None:
    desk = make_desk(num_slots=8)
    a = desk.join("a")
    b = desk.join("b", next_step=50)
    desk.ask(*a, packs=4)
    desk.ask(*b, packs=4)
    assert desk.work() == [0, 50, 1, 51, 2, 52, 3, 53]


def test_a_seek_backwards_takes_the_slots_of_what_is_needed_later(make_desk) -> None:
    desk = make_desk(num_slots=4)
    a, b = desk.join("a"), desk.join("b", next_step=3)
    desk.ask(*b, packs=4)
    assert desk.work() == [3, 4, 5, 6]
    assert desk.get(*a) == [0]
    assert {slot.sequence_number for slot in desk.shelf.slots} == {3, 4, 5, 0}


def test_a_slot_under_a_lease_is_not_recycled(make_desk) -> None:
    desk = make_desk(num_slots=1)
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation)
    desk.work()
    (lease,) = desk.ask(name, incarnation).leases
    desk.control.pause(name)  # so that nobody needs the pack, only the reader holds it
    other = desk.join("b", next_step=50)
    desk.ask(*other)
    assert desk.work() == []
    desk.pass_time(60.0)
    desk.ask(*other)
    assert desk.work() == [50]
    assert not desk.ledger.confirm(lease.token, lease.facts.generation)


def test_a_live_start_begins_at_the_newest_pack(make_desk) -> None:
    desk = make_desk(num_packs=10)
    a = desk.join("a")
    for _ in range(4):
        desk.get(*a)
    b = desk.join("b", start=Start.LIVE)
    assert desk.get(*b) == [3]
    assert desk.computed == [0, 1, 2, 3]
    for _ in range(6):
        desk.get(*a)
        desk.get(*b)
    with pytest.raises(SlipstreamError, match="end at pack 10"):
        desk.open("c", start=Start.LIVE, packs_per_step=2)


def test_hidden_states_that_are_not_finite_reach_no_run(desk: LedgerDesk) -> None:
    a, b = desk.join("a"), desk.join("b", packs_per_step=2)
    desk.ask(*a)
    work = desk.queue.next_work(0.0)
    assert work is not None and work.sequence_number == 0
    desk.queue.quarantine(work, ("c17", "c3"))
    assert desk.ask(*a).quarantined == (0,)
    assert desk.get(*a) == [1]
    assert desk.get(*b) == [1]
    c, incarnation = desk.join("c")
    assert desk.ask(c, incarnation).quarantined == (0,), "a run that comes later is told as well"
    assert desk.control.counters(STREAM).subscriptions[0].packs_quarantined == 1


def test_a_pack_that_one_run_rejects_is_computed_anew_while_another_reads_it(make_desk) -> None:
    """Else the run would get the same damaged bytes again, and the pack would be quarantined for nothing."""
    desk = make_desk(num_slots=2, num_packs=3)
    a, b = desk.join("a"), desk.join("b")
    desk.ask(*a)
    desk.work()
    ((of_a,), (of_b,)) = desk.ask(*a).leases, desk.ask(*b).leases
    assert of_a.slot is of_b.slot
    assert desk.ledger.release([of_a.token], pack_at_fault=True) == []
    assert desk.ask(*a).leases == ()
    assert desk.work() == [0]
    (again,) = desk.ask(*a).leases
    assert again.slot is not of_b.slot and desk.shelf.packs_recomputed == 1
    assert desk.ledger.confirm(of_b.token, of_b.facts.generation), "its slot was left alone"
    assert desk.ledger.confirm(again.token, again.facts.generation)
    assert [desk.get(*a), desk.get(*b)] == [[1], [1]], "the slot of the rejected pack is used again"


def test_an_abandoned_pack_is_computed_later(desk: LedgerDesk) -> None:
    a = desk.join("a")
    desk.ask(*a)
    work = desk.queue.next_work(0.0)
    assert work is not None
    assert desk.queue.next_work(0.0) is None, "it is being written"
    desk.queue.abandon(work)
    assert desk.get(*a) == [0]


def test_a_stream_is_retired_only_when_nobody_uses_it(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    assert desk.get(name, incarnation) == [0]
    assert not desk.shelves.retire(STREAM)
    desk.pass_time(31.0)
    assert desk.shelves.retire(STREAM)
    assert desk.ledger.wanted_by(name) == (STREAM, terms("a"))
    desk.shelves.add(STREAM, desk.shelf)
    assert desk.get(name, incarnation) == [1]


def test_how_long_a_run_waits_for_packs(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    (idle,) = desk.control.counters(STREAM, of_subscription=name).subscriptions
    assert (idle.trainer_wait_seconds, idle.serving_seconds, idle.trainer_wait_ratio) == (0.0, 0.0, 0.0)
    desk.ask(name, incarnation)
    desk.pass_time(4.0)
    subscription = desk.book.subscriptions[name]
    subscription.begin_wait(desk.now)  # two threads of one trainer wait at the same time
    desk.pass_time(2.0)
    subscription.begin_wait(desk.now)
    subscription.end_wait(desk.now)
    desk.pass_time(1.0)
    (waits,) = desk.control.counters(STREAM).subscriptions
    assert (waits.trainer_wait_seconds, waits.serving_seconds) == (3.0, 7.0), "a poll in progress counts so far"
    subscription.end_wait(desk.now)
    desk.pass_time(5.0)
    counters = desk.control.counters("", of_subscription=name)
    assert (counters.stream, counters.subscriptions[0].trainer_wait_ratio) == (STREAM, 0.25)


def test_counters_of_what_is_not_there(desk: LedgerDesk) -> None:
    name, _ = desk.join("a")
    desk.control.close(name)
    for query, reason in (
        ({"stream": "streams/none"}, Reason.SUBSCRIPTION_UNKNOWN),
        ({"stream": "", "of_subscription": "subscriptions/none"}, Reason.SUBSCRIPTION_UNKNOWN),
        ({"stream": "", "of_subscription": name}, Reason.STREAM_CLOSED),
    ):
        with pytest.raises(SlipstreamError) as refused:
            desk.control.counters(**query)
        assert refused.value.reason is reason
