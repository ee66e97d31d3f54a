"""Incarnations, seeks and commits of one subscription, and the operators' verbs on it."""

import threading
import time

import pytest

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.lease_book import DeliveryState
from target_server.lease_ledger import Ask, SeekTo
from target_server.lineage import lineage_report
from target_server.shelf import PackFacts
from tests.fakes.ledger_desk import FINGERPRINT, STREAM, LedgerDesk, terms


def refused(reason: Reason) -> pytest.RaisesExc[SlipstreamError]:
    return pytest.RaisesExc(SlipstreamError, check=lambda error: error.reason is reason)


def test_a_seek_voids_everything_older(desk: LedgerDesk) -> None:
    name, old = desk.join("a")
    desk.ask(name, old, packs=2)
    desk.work()
    (lease,) = desk.ask(name, old).leases
    new = desk.seek(name, 0)
    assert new == old + 1
    for call in (
        lambda: desk.ledger.confirm(lease.token, 0),
        lambda: desk.ledger.renew([lease.token], 1.0),
        lambda: desk.ledger.release([lease.token], pack_at_fault=False),
        lambda: desk.ledger.reading(lease.token),
        lambda: desk.ledger.commit(name, old, 0),
        lambda: desk.ask(name, old),
        lambda: desk.ledger.seek(name, SeekTo(0, 0, expected_incarnation=old - 1)),
    ):
        with refused(Reason.INCARNATION_STALE):
            call()
    assert desk.get(name, new, packs=2) == [0, 1]
    assert desk.computed == [0, 1], "still on the shelf"


def test_of_two_trainers_that_claim_a_run_the_later_owns_it(desk: LedgerDesk) -> None:
    name, first = desk.join("a")
    second = desk.seek(name, 0)
    with refused(Reason.INCARNATION_STALE):
        desk.ask(name, first)
    assert desk.get(name, second) == [0]


def test_a_repeated_seek_gets_the_same_incarnation(desk: LedgerDesk) -> None:
    name = desk.open("a")
    request = SeekTo(0, 0, expected_incarnation=0, request_id="seek-1")
    assert [desk.ledger.seek(name, request) for _ in range(2)] == [1, 1]
    with refused(Reason.INCARNATION_STALE):
        desk.ledger.seek(name, SeekTo(0, 0, expected_incarnation=0, request_id="seek-2"))


def test_a_lineage_newer_than_the_ledger_wins(desk: LedgerDesk) -> None:
    name = desk.open("a")
    assert desk.ledger.seek(name, SeekTo(7, 3, expected_incarnation=0, lineage_incarnation=12)) == 13
    assert desk.get(name, 13) == [10]


def test_quarantined_packs_of_the_cursor_are_skipped(desk: LedgerDesk) -> None:
    name, _ = desk.join("a")
    incarnation = desk.seek(name, 0, quarantined=frozenset({0, 2}))
    assert [desk.get(name, incarnation) for _ in range(2)] == [[1], [3]]
    assert 0 not in desk.computed


def test_a_commit_is_idempotent_and_moves_the_cursor(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a", packs_per_step=2)
    desk.get(name, incarnation, packs=2)
    assert desk.ledger.commit(name, incarnation, 0) == []
    assert desk.ledger.commit(name, incarnation, 0) == []
    assert desk.book.subscriptions[name].record.next_step == 1
    assert desk.get(name, incarnation) == [2]


@pytest.mark.parametrize("step", [-1, 1, 7, 2**63 - 1])
def test_a_step_whose_packs_were_not_handed_out_cannot_be_committed(desk: LedgerDesk, step: int) -> None:
    name, incarnation = desk.join("a", packs_per_step=2)
    desk.get(name, incarnation, packs=3)
    with refused(Reason.SPEC_INVALID):
        desk.ledger.commit(name, incarnation, step)
    assert desk.book.subscriptions[name].record.next_step == 0
    assert desk.get(name, incarnation) == [3], "the cursor has not moved"


def test_a_step_before_the_incarnation_is_not_committed_by_it(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a", next_step=5)
    assert desk.ledger.commit(name, incarnation, 2) == []
    assert lineage_report(desk.store.path, "a").steps_committed == 0
    assert desk.get(name, incarnation) == [5]


def test_steps_are_committed_in_order(desk: LedgerDesk) -> None:
    """So that the ledger proves the order, too: what it holds of an incarnation never had a gap."""
    name, incarnation = desk.join("a", packs_per_step=2)
    for _ in range(3):
        desk.get(name, incarnation, packs=2)
    desk.ledger.commit(name, incarnation, 0)
    with refused(Reason.SPEC_INVALID):
        desk.ledger.commit(name, incarnation, 2)
    for step in (0, 1, 0, 2):
        desk.ledger.commit(name, incarnation, step)
    report = lineage_report(desk.store.path, "a")
    assert report.exactly_once, report
    assert (report.steps_committed, report.steps_discarded, report.next_sequence_number) == (3, 0, 6)


@pytest.mark.parametrize(
    "to, words",
    [
        (SeekTo(-1, 0, 1), "not negative"),
        (SeekTo(0, -1, 1), "not negative"),
        (SeekTo(51, 0, 1), "Step 51 of subscriptions/a would begin at pack 102; its stream ends at pack 100"),
        (SeekTo(0, 10**12, 1), "ends at pack 100"),
        (SeekTo(2**62, 0, 1), "ends at pack 100"),
        (SeekTo(0, 0, 1, lineage_incarnation=2**63 - 1), "no incarnation"),
    ],
)
def test_a_cursor_that_cannot_be_is_refused(desk: LedgerDesk, to: SeekTo, words: str) -> None:
    name, incarnation = desk.join("a", packs_per_step=2)
    with pytest.raises(SlipstreamError, match=words) as caught:
        desk.ledger.seek(name, to)
    assert caught.value.reason is Reason.SPEC_INVALID
    assert desk.get(name, incarnation) == [0], "nothing has happened"
    assert desk.seek(name, 50) == incarnation + 1, "the end itself is a cursor"


def test_a_stream_that_repeats_has_a_horizon(make_desk) -> None:
    desk = make_desk(num_packs=None)
    desk.shelves.add(STREAM, desk.shelf, horizon=10**9)
    name, _ = desk.join("a")
    with refused(Reason.SPEC_INVALID):
        desk.seek(name, 10**9 + 1)
    with refused(Reason.SPEC_INVALID):
        desk.seek(name, 10**9)  # a thousand million commits in one go


def test_steps_that_a_seek_skips_are_one_write(desk: LedgerDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _ = desk.join("a")
    commits: list[str] = []
    desk.store._connection.set_trace_callback(lambda text: commits.append(text) if text == "COMMIT" else None)
    desk.seek(name, 90)
    assert commits == ["COMMIT"]
    report = lineage_report(desk.store.path, "a")
    assert report.exactly_once and report.steps_committed == 90


def test_a_commit_voids_leases_of_its_step(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation)
    desk.work()
    (lease,) = desk.ask(name, incarnation).leases
    desk.ledger.commit(name, incarnation, 0)
    assert not desk.ledger.confirm(lease.token, 0)
    assert desk.get(name, incarnation) == [1]


def test_reopening_is_idempotent_and_refuses_other_terms(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    desk.get(name, incarnation)
    assert desk.open("a") == name
    assert desk.get(name, incarnation) == [1]
    for changes in ({"layer_ids": (1, 2)}, {"last_hidden_state": True}, {"packs_per_step": 3}):
        with refused(Reason.STREAM_CHANGED):
            desk.open("a", **changes)
    with refused(Reason.STREAM_CHANGED):
        desk.ledger.open(terms("a"), "streams/other", FINGERPRINT, 100)
    with refused(Reason.TARGET_FINGERPRINT_MISMATCH):
        desk.ledger.open(terms("a"), STREAM, "target-b", 100)


def test_pause_resume_close(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation, packs=2)
    desk.work()
    (lease,) = desk.ask(name, incarnation).leases
    desk.control.pause(name)
    assert desk.ask(name, incarnation).state is DeliveryState.PAUSED
    assert desk.ledger.confirm(lease.token, 0), "what was leased may be used"
    desk.control.resume(name)
    (lease,) = desk.ask(name, incarnation).leases
    desk.control.close(name)
    desk.control.close(name)
    for call in (lambda: desk.ask(name, incarnation), lambda: desk.ledger.confirm(lease.token, 0)):
        with refused(Reason.STREAM_CLOSED):
            call()
    assert desk.open("a") == name
    for stale_call in (
        lambda: desk.ask(name, incarnation),
        lambda: desk.ledger.commit(name, incarnation, 0),
        lambda: desk.ledger.confirm(lease.token, 0),
        lambda: desk.ledger.seek(name, SeekTo(0, 0, expected_incarnation=incarnation)),
    ):
        with refused(Reason.INCARNATION_STALE):
            stale_call()
    assert desk.seek(name, 0) == incarnation + 2, "opening anew has fenced the older trainer off"


def test_draining_grants_nothing_and_waits_for_leases(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation, packs=2)
    desk.work(1)
    (lease,) = desk.ask(name, incarnation).leases
    desk.control.drain()
    assert desk.work() == []
    assert desk.ask(name, incarnation).state is DeliveryState.DRAINING
    assert not desk.control.wait_until_drained(0.0)
    desk.ledger.confirm(lease.token, 0)
    assert desk.control.wait_until_drained(0.0)


def test_a_token_of_another_process_is_lost(desk: LedgerDesk) -> None:
    desk.join("a")
    for token in (b"0000/1/1/subscriptions/a", b"", b"\xff\xfe"):
        with refused(Reason.LEASE_LOST):
            desk.ledger.confirm(token, 0)


class TestLongPoll:
    """On the real clock, in threads."""

    @pytest.fixture
    def polling(self, desk: LedgerDesk):
        desk.book.clock = time.monotonic
        name, incarnation = desk.join("a")
        outcome: list[object] = []

        def poll(cancelled=lambda: False) -> None:
            try:
                outcome.append(desk.ledger.lease(name, Ask(incarnation, 1, max_wait=20.0), cancelled))
            except SlipstreamError as error:
                outcome.append(error)

        def start(**options) -> threading.Thread:
            thread = threading.Thread(target=poll, kwargs=options)
            thread.start()
            return thread

        return desk, name, start, outcome

    def test_wakes_for_a_pack(self, polling) -> None:
        desk, _, start, outcome = polling
        thread = start()
        work = desk.queue.next_work(max_wait=10.0)
        assert work is not None
        desk.queue.publish(work, PackFacts(1, 1, 2))
        thread.join(10.0)
        assert [lease.sequence_number for lease in outcome[0].leases] == [0]

    @pytest.mark.parametrize("event, reason", [("seek", Reason.INCARNATION_STALE), ("close", Reason.STREAM_CLOSED)])
    def test_wakes_when_its_ground_is_gone(self, polling, event: str, reason: Reason) -> None:
        desk, name, start, outcome = polling
        thread = start()
        assert desk.queue.next_work(max_wait=10.0) is not None, "the poll has begun"
        desk.seek(name, 0) if event == "seek" else desk.control.close(name)
        thread.join(10.0)
        assert outcome[0].reason is reason

    def test_a_caller_that_hung_up_is_granted_nothing(self, polling) -> None:
        desk, name, start, outcome = polling
        gone = threading.Event()
        thread = start(cancelled=gone.is_set)
        assert desk.queue.next_work(max_wait=10.0) is not None
        gone.set()
        desk.ledger.wake()
        thread.join(10.0)
        assert outcome[0].leases == ()
        assert desk.book.subscriptions[name].leased == {}

    def test_a_run_that_leaves_ends_its_polls_and_stays_away(self, polling) -> None:
        desk, name, start, outcome = polling
        thread = start()
        assert desk.queue.next_work(max_wait=10.0) is not None, "the poll has begun"
        desk.ledger.leave(name, 1)
        thread.join(10.0)
        assert outcome[0].leases == ()
        subscription = desk.book.subscriptions[name]
        assert not desk.book.present(subscription)
        desk.ledger.lease(name, Ask(1))
        assert desk.book.present(subscription), "healed by the next call"

    def test_an_abandoned_poll_does_not_count_as_a_call(self, polling) -> None:
        desk, name, start, _ = polling
        gone = threading.Event()
        thread = start(cancelled=gone.is_set)
        assert desk.queue.next_work(max_wait=10.0) is not None
        with desk.book.lock:
            began = desk.book.subscriptions[name].last_seen
        gone.set()
        desk.ledger.wake()
        thread.join(10.0)
        assert desk.book.subscriptions[name].last_seen == began

    def test_close_wakes_the_engine(self, desk: LedgerDesk) -> None:
        outcome: list[object] = []
        thread = threading.Thread(target=lambda: outcome.append(desk.queue.next_work()))
        thread.start()
        desk.queue.close()
        thread.join(10.0)
        assert outcome == [None]
