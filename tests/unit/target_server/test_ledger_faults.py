"""What may go wrong around the ledger: a disk that takes nothing, time that passes meanwhile, shelves that go away."""

import sqlite3
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager, closing

import pytest

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.status import encode_error
from target_server.lease_book import DeliveryState
from target_server.ledger_store import LedgerStore
from target_server.lineage import lineage_report
from target_server.shelf import PackFacts, Shelf
from target_server.subscription import Start
from tests.fakes.ledger_desk import FINGERPRINT, STREAM, LedgerDesk, full_disk, locked_by_another_program, terms


def reopened(desk: LedgerDesk) -> LedgerDesk:
    """The desk of the next server process, on the same file."""
    desk.close()
    return LedgerDesk(desk.store.path)


@pytest.mark.parametrize(
    ("fault", "words"),
    [(full_disk, "disk .* is full"), (locked_by_another_program, "holds a lock.*database is locked")],
)
def test_who_must_write_is_sent_away_to_come_again_and_nobody_else_notices(
    desk: LedgerDesk,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[LedgerStore], AbstractContextManager[None]],
    words: str,
) -> None:
    name, incarnation = desk.join("a")
    other = desk.join("b")
    assert desk.get(name, incarnation) == [0]
    calls = (
        lambda: desk.ledger.commit(name, incarnation, 0),
        lambda: desk.seek(name, 1),
        lambda: desk.control.pause(name),
        lambda: desk.open("c"),
    )
    with fault(desk.store), caplog.at_level("INFO"):
        for call in calls * 2:
            with pytest.raises(SlipstreamError, match=words) as caught:
                call()
            assert caught.value.reason is Reason.LEDGER_UNWRITABLE and caught.value.remedy
            assert encode_error(caught.value).code.name == "UNAVAILABLE", "the client waits, and asks again"
        assert desk.get(*other) == [0] and desk.get(*other) == [1]
    fields = [getattr(record, "slipstream_fields", {}) for record in caplog.records]
    assert [each["subscription"] for each in fields] == [name, "subscriptions/c"], "once each, although all came twice"
    caplog.clear()
    with caplog.at_level("INFO"):
        desk.ledger.commit(name, incarnation, 0)
        desk.ledger.commit(*other, 0)
    (again,) = [record for record in caplog.records if record.message == "ledger_written_again"]
    assert again.slipstream_fields == {"refused_meanwhile": [name, "subscriptions/c"]}
    desk.ledger.commit(*other, 1)
    reports = [lineage_report(desk.store.path, run) for run in ("a", "b")]
    assert [(report.exactly_once, report.packs_counted) for report in reports] == [(True, 1), (True, 2)]


def test_who_must_read_is_sent_away_too_and_the_log_says_why(
    desk: LedgerDesk, caplog: pytest.LogCaptureFixture
) -> None:
    """A ledger without a write-ahead log, as on a file system that shares no memory: who writes locks readers out."""
    desk.join("a")
    desk.store._connection.execute("PRAGMA journal_mode = DELETE")
    with closing(sqlite3.connect(desk.store.path, isolation_level=None)) as other, caplog.at_level("INFO"):
        other.execute("BEGIN EXCLUSIVE")
        for run in ("b", "b", "c"):
            with pytest.raises(SlipstreamError, match="holds a lock") as caught:
                desk.open(run)
            assert caught.value.reason is Reason.LEDGER_UNWRITABLE
        other.execute("ROLLBACK")
        desk.open("b")
        desk.open("c")
    not_read = {"why": caught.value.message, "then": caught.value.remedy}
    said = [(record.message, record.slipstream_fields) for record in caplog.records]  # type: ignore[attr-defined]
    assert said == [
        ("ledger_not_read", {"subscription": "subscriptions/b"} | not_read),
        ("ledger_not_read", {"subscription": "subscriptions/c"} | not_read),
        ("ledger_read_again", {"refused_meanwhile": ["subscriptions/b", "subscriptions/c"]}),
    ]


def test_what_nobody_can_mend_is_no_reason_to_wait(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    desk.get(name, incarnation)
    desk.store._connection.execute("DROP TABLE commits")
    with pytest.raises(SlipstreamError, match="no such table") as caught:
        desk.ledger.commit(name, incarnation, 0)
    assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED


def test_a_server_forgets_what_was_closed_and_its_ledger_does_not(desk: LedgerDesk) -> None:
    for turn in range(20):
        name, incarnation = desk.join(f"run-{turn}")
        assert desk.get(name, incarnation) == [0]
        desk.ledger.commit(name, incarnation, 0)
        desk.control.close(name)
    assert not desk.book.subscriptions and not desk.book.leases
    later = reopened(desk)
    assert not later.book.subscriptions
    for call in (
        lambda: later.ask(name, incarnation),
        lambda: later.ledger.commit(name, incarnation, 1),
        lambda: later.control.pause(name),
        lambda: later.ledger.wanted_by(name),
    ):
        with pytest.raises(SlipstreamError, match="was closed") as caught:
            call()
        assert caught.value.reason is Reason.STREAM_CLOSED
    later.control.close(name)
    with pytest.raises(SlipstreamError) as unknown:
        later.control.close("subscriptions/nobody")
    assert unknown.value.reason is Reason.SUBSCRIPTION_UNKNOWN
    report = lineage_report(later.store.path, "run-19")
    assert report.exactly_once and report.packs_counted == 1
    assert later.open("run-19") == name
    assert later.seek(name, 1) == incarnation + 2, "opened anew, it has fenced the older trainer off"
    later.close()


@pytest.mark.parametrize(
    "rest", [b"", b"x/1/subscriptions/a", b"1/1/\xff\xfe", b"1/1/", b"1/subscriptions/a", b"9" * 5000 + b"/1/a"]
)
def test_a_token_that_only_begins_like_ours_is_refused_in_words(desk: LedgerDesk, rest: bytes) -> None:
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation)
    desk.work()
    (lease,) = desk.ask(name, incarnation).leases
    token = lease.token.partition(b"/")[0] + b"/" + rest
    for call in (
        lambda: desk.ledger.reading(token),
        lambda: desk.ledger.confirm(token, 0),
        lambda: desk.ledger.renew([token], 1.0),
        lambda: desk.ledger.release([token], pack_at_fault=True),
    ):
        with pytest.raises(SlipstreamError, match="is no lease token") as caught:
            call()
        assert caught.value.reason is Reason.SPEC_INVALID
        assert encode_error(caught.value).code.name == "INVALID_ARGUMENT"
    assert desk.ledger.confirm(lease.token, lease.facts.generation), "nothing has happened"


def test_a_quarantine_that_cannot_be_written_ends_no_engine(desk: LedgerDesk, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the queue raises ends the engine, and with it the server and every run."""
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation, packs=2)
    work = desk.queue.next_work(0.0)
    assert work is not None
    with desk.unwritable(), caplog.at_level("WARNING"):
        desk.queue.quarantine(work, ("c17",))
    said = {record.message for record in caplog.records}
    assert said == {"ledger_not_written", "quarantine_not_saved", "pack_quarantined"}
    assert desk.ask(name, incarnation).quarantined == (0,)
    desk.ledger.commit(name, incarnation, 0)
    assert desk.get(name, incarnation) == [1]
    assert lineage_report(desk.store.path, "a").quarantined == (0,)


def test_a_pack_that_readers_reject_is_set_aside_though_nothing_can_be_written(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    for _ in range(2):
        desk.ask(name, incarnation)
        desk.work()
        (lease,) = desk.ask(name, incarnation).leases
        with desk.unwritable():
            quarantined = desk.ledger.release([lease.token], pack_at_fault=True)
    assert quarantined == [lease]
    assert desk.get(name, incarnation) == [1]


def test_a_group_that_could_not_be_written_has_not_started(desk: LedgerDesk) -> None:
    runs = [desk.join(run, group="sweep", group_size=2) for run in ("a", "b")]
    with desk.unwritable(), pytest.raises(SlipstreamError, match="locked"):
        desk.ask(*runs[0])
    assert desk.ask(*runs[0]).state is DeliveryState.ACTIVE
    later = reopened(desk)
    assert all(later.book.subscriptions[name].record.started for name, _ in runs)
    later.close()


def test_terms_that_could_not_be_written_are_not_those_of_the_run(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    other = terms("a", max_epochs=3)
    with desk.unwritable(), pytest.raises(SlipstreamError, match="locked"):
        desk.ledger.open(other, STREAM, FINGERPRINT, 300)
    assert desk.book.subscriptions[name].record.terms == terms("a")
    desk.ledger.open(other, STREAM, FINGERPRINT, 300)
    assert desk.book.subscriptions[name].record.terms == other
    assert desk.get(name, incarnation) == [0]


def test_what_ends_between_a_look_and_a_wait_is_not_slept_through(desk: LedgerDesk) -> None:
    """Else the engine waits for ever with a slot whose lease has run out, until somebody happens to call."""
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation)
    desk.work()
    desk.ask(name, incarnation, time_to_live=5.0)
    with desk.book.lock:
        desk.book.expire()
        desk.pass_time(5.0)
        assert desk.book.next_deadline() == 5.0
        desk.book.expire()
        assert desk.book.next_deadline() == 30.0, "the lease is over; the run counts as present still"
        desk.pass_time(25.0)
        assert desk.book.next_deadline() == 30.0
        desk.book.expire()
        assert desk.book.next_deadline() == float("inf")


def test_a_pause_does_not_count_against_the_others(make_desk) -> None:  # type: ignore[no-untyped-def]
    """A run that was held up when it was paused waits for the slower one no shorter than any other."""
    desk = make_desk(num_slots=4, num_packs=None)
    fast, slow = desk.join("fast"), desk.join("slow")
    while desk.get(*fast, packs=4):
        pass
    assert desk.book.subscriptions[fast[0]].pace.is_held
    desk.control.pause(fast[0])
    desk.work()
    for _ in range(4):
        desk.pass_time(20.0)
        desk.ask(*slow, packs=0)
        desk.work()
    desk.control.resume(fast[0])
    desk.ask(*fast)
    desk.work()
    assert not desk.book.subscriptions[slow[0]].pace.left_behind
    desk.pass_time(desk.book.limits.patience)
    desk.work()
    assert desk.book.subscriptions[slow[0]].pace.left_behind == 1, "as always, after its patience"


def test_a_stream_that_made_room_for_another_cannot_be_joined_live(desk: LedgerDesk) -> None:
    """It was opened, and before its run had subscribed, another run's stream took its memory."""
    assert desk.shelves.retire(STREAM)
    with pytest.raises(SlipstreamError, match="made room") as caught:
        desk.open("a", start=Start.LIVE)
    assert caught.value.reason is Reason.TARGET_LOADING
    desk.open("b")


def test_a_shelf_remembers_no_more_than_it_has_computed() -> None:
    """A cursor may be far ahead: the memory of what was computed is not as long as the stream."""
    shelf = Shelf(2, 64)
    tracemalloc.start()
    for number in (0, 10**7, 10**12):
        slot = next(slot for slot in shelf.slots if not shelf.holds(slot.sequence_number))
        for _ in range(2):
            shelf.discard(slot)
            shelf.reserve(slot, number)
            shelf.publish(slot, PackFacts(1, 1, 2))
        shelf.discard(slot)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (shelf.packs_computed, shelf.packs_recomputed) == (6, 3)
    assert peak < 2**20
