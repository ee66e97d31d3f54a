"""The SQLite file: what survives a crash, the proof of the lineage, and files that cannot be used."""

import shutil
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.lease_ledger import SeekTo
from target_server.ledger_store import SCHEMA_VERSION, LedgerStore
from target_server.lineage import lineage_report
from tests.fakes.ledger_desk import FINGERPRINT, STREAM, LedgerDesk, terms


def train(desk: LedgerDesk, name: str, incarnation: int, steps: Iterable[int]) -> None:
    """Get the packs of every step, then commit it."""
    for step in steps:
        while not desk.book.subscriptions[name].handed_out(step):
            assert desk.get(name, incarnation)
        desk.ledger.commit(name, incarnation, step)


def test_a_restart_finds_every_subscription(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.sqlite"
    desk = LedgerDesk(path)
    name, incarnation = desk.join("a", packs_per_step=2)
    train(desk, name, incarnation, range(2))
    paused, _ = desk.join("b", next_step=5)
    desk.control.pause(paused)
    closed, _ = desk.join("c")
    desk.control.close(closed)
    desk.close()

    desk = LedgerDesk(path)
    records = {record.name: record for record in desk.store.subscriptions()}
    assert records.keys() == {name, paused}, "what is closed is not kept in memory"
    assert (records[name].incarnation, records[name].next_step) == (1, 2)
    assert records[name].terms == terms("a", packs_per_step=2)
    assert records[paused].paused and records[paused].next_step == 5
    found = desk.store.find(closed)
    assert found is not None and found.closed
    assert desk.open("a", packs_per_step=2) == name
    desk.ledger.commit(name, incarnation, 2)  # trained on packs of the server that is gone
    with pytest.raises(SlipstreamError, match="handed out by an earlier server process"):
        desk.ledger.commit(name, incarnation, 4)
    assert desk.get(name, incarnation) == [6], "the incarnation is still current, and goes on where it committed"
    desk.close()


def test_a_commit_that_a_power_cut_took_is_made_good_by_the_next_seek(tmp_path: Path) -> None:
    path, cut = tmp_path / "ledger.sqlite", tmp_path / "cut.sqlite"
    desk = LedgerDesk(path)
    name, incarnation = desk.join("a")
    for number in range(5):
        if number == 3:  # what the disk has got
            for suffix in ("", "-wal"):
                shutil.copy(f"{path}{suffix}", f"{cut}{suffix}")
        train(desk, name, incarnation, [number])
    desk.close()

    desk = LedgerDesk(cut)
    assert desk.book.subscriptions[name].record.next_step == 3
    desk.open("a")
    with pytest.raises(SlipstreamError, match="has lost the steps from 3 on") as caught:
        desk.ledger.commit(name, incarnation, 5)
    assert caught.value.reason is Reason.LEASE_LOST
    train(desk, name, desk.seek(name, 6), [6])
    report = lineage_report(cut, "a")
    assert report.exactly_once and report.next_sequence_number == 7, report
    desk.close()


def test_what_is_synced_and_what_is_not(tmp_path: Path) -> None:
    """A commit must not wait for the disk: all runs' commits wait in turn, and so do their trainers."""
    desk = LedgerDesk(tmp_path / "ledger.sqlite")
    statements: list[str] = []
    desk.store._connection.set_trace_callback(statements.append)
    name, incarnation = desk.join("a")
    assert sum("synchronous = FULL" in each for each in statements) == 2, "opened and sought"
    assert statements[-1] == "PRAGMA synchronous = NORMAL"
    statements.clear()
    train(desk, name, incarnation, [0])
    assert statements and not any("synchronous" in each for each in statements)
    desk.close()


def test_another_target_on_the_same_ledger_is_refused(tmp_path: Path) -> None:
    desk = LedgerDesk(tmp_path / "ledger.sqlite")
    desk.join("a")
    desk.close()
    desk = LedgerDesk(tmp_path / "ledger.sqlite")
    with pytest.raises(SlipstreamError, match=FINGERPRINT) as caught:
        desk.ledger.open(terms("a"), STREAM, "target-b", 100)
    assert caught.value.reason is Reason.TARGET_FINGERPRINT_MISMATCH
    desk.close()


class TestLineage:
    def test_a_straight_run(self, desk: LedgerDesk) -> None:
        name, incarnation = desk.join("a", packs_per_step=2)
        train(desk, name, incarnation, range(3))
        report = lineage_report(desk.store.path, "a")
        assert report.exactly_once
        assert (report.steps_committed, report.steps_discarded, report.next_sequence_number) == (3, 0, 6)

    def test_what_a_resume_threw_away_does_not_count(self, desk: LedgerDesk) -> None:
        name, incarnation = desk.join("a")
        train(desk, name, incarnation, range(5))
        incarnation = desk.seek(name, 2)
        train(desk, name, incarnation, range(2, 4))
        incarnation = desk.seek(name, 3)
        train(desk, name, incarnation, [3])
        report = lineage_report(desk.store.path, "a")
        assert report.exactly_once
        assert (report.incarnations, report.steps_committed, report.steps_discarded) == (3, 4, 4)

    def test_a_commit_whose_answer_was_lost_is_made_good_by_the_seek(self, desk: LedgerDesk) -> None:
        name, incarnation = desk.join("a")
        train(desk, name, incarnation, [0])
        incarnation = desk.seek(name, 2)
        train(desk, name, incarnation, [2])
        assert lineage_report(desk.store.path, "a").exactly_once

    def test_a_step_that_nobody_committed_is_missing(self, desk: LedgerDesk) -> None:
        name, incarnation = desk.join("a", packs_per_step=2)
        train(desk, name, incarnation, [0])
        record = desk.book.subscriptions[name].record
        desk.store.commit(record, 2, range(4, 6))  # a file of an earlier version, which asked for no order
        report = lineage_report(desk.store.path, "a")
        assert not report.exactly_once
        assert report.missing == (2, 3)

    def test_quarantined_packs_are_named(self, desk: LedgerDesk) -> None:
        name, _ = desk.join("a", packs_per_step=2)
        incarnation = desk.seek(name, 0, quarantined=frozenset({1, 50}))
        train(desk, name, incarnation, [0])
        assert lineage_report(desk.store.path, "a").quarantined == (1,)

    def test_a_lost_ledger_begins_where_the_run_was(self, desk: LedgerDesk) -> None:
        name, incarnation = desk.join("a", next_step=7)
        train(desk, name, incarnation, [7])
        report = lineage_report(desk.store.path, "a")
        assert report.exactly_once
        assert (report.first_sequence_number, report.next_sequence_number) == (7, 8)

    def test_who_committed_nothing_has_replaced_nothing(self, desk: LedgerDesk) -> None:
        """Trainers that were killed before their first step: without a checkpoint, from an older one, from a newer."""
        name, incarnation = desk.join("a")
        train(desk, name, incarnation, range(6))
        for next_step in (0, 3, 6):
            desk.seek(name, next_step)
            report = lineage_report(desk.store.path, "a")
            assert report.exactly_once, report
            assert (report.incarnations, report.steps_committed, report.steps_discarded) == (1, 6, 0)
        desk.seek(name, 2)
        train(desk, name, desk.seek(name, 8), [8])
        report = lineage_report(desk.store.path, "a")
        assert report.exactly_once, "steps 6 and 7 count for the first incarnation: the weights have them"
        assert (report.incarnations, report.steps_committed, report.steps_discarded) == (2, 9, 0)

    def test_who_began_elsewhere_and_committed_nothing_breaks_no_proof(self, desk: LedgerDesk) -> None:
        """A second trainer of the run, without its checkpoint, that began live: its step 0 has other packs."""
        name, incarnation = desk.join("a")
        train(desk, name, incarnation, range(4))
        desk.ledger.seek(name, SeekTo(0, 40, incarnation))
        incarnation = desk.ledger.seek(name, SeekTo(4, 0, incarnation + 1))
        train(desk, name, incarnation, [4])
        report = lineage_report(desk.store.path, "a")
        assert report.exactly_once and report.packs_counted == 5, report

    def test_a_run_opened_anew_with_larger_steps_begins_anew(self, desk: LedgerDesk) -> None:
        name, incarnation = desk.join("a")
        train(desk, name, incarnation, range(3))
        desk.control.close(name)
        desk.open("a", packs_per_step=2)
        desk.seek(name, 0)
        train(desk, name, desk.seek(name, 1), [1])  # the commit of its step 0 was lost
        report = lineage_report(desk.store.path, "a")
        assert report.exactly_once and (report.steps_committed, report.next_sequence_number) == (2, 4), report

    def test_what_a_cursor_left_out_is_no_pack_that_counts(self, desk: LedgerDesk) -> None:
        """The answer to the commit was lost, and so was the server that had set the pack aside."""
        name, _ = desk.join("a")
        train(desk, name, desk.seek(name, 3, quarantined=frozenset({1})), [3])
        report = lineage_report(desk.store.path, "a")
        assert (report.quarantined, report.packs_counted) == ((1,), 3)

    def test_an_unknown_run(self, desk: LedgerDesk) -> None:
        with pytest.raises(SlipstreamError, match="'nobody'"):
            lineage_report(desk.store.path, "nobody")


def refused(path: Path, words: str, reason: Reason = Reason.ENVIRONMENT_UNSUPPORTED) -> None:
    with pytest.raises(SlipstreamError, match=words) as caught:
        LedgerStore(path)
    assert caught.value.reason is reason
    assert caught.value.remedy


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_text("not a database, but long enough to look like one would be " * 30)
    refused(path, "not a database")


def test_a_database_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE things (x)")
    connection.close()
    refused(path, "not a ledger of a target server")


def test_a_ledger_of_a_newer_version(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    LedgerStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    refused(path, f"format {SCHEMA_VERSION + 1}; this version of Slipstream knows format {SCHEMA_VERSION}")
    with pytest.raises(SlipstreamError, match="format"):
        lineage_report(path, "a")


def test_a_ledger_in_use(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger.sqlite")
    refused(tmp_path / "ledger.sqlite", "in use by another target server")
    store.close()
    store.close()
    LedgerStore(tmp_path / "ledger.sqlite").close()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file" / "ledger.sqlite", "cannot be used")
    (tmp_path / "directory").mkdir()
    refused(tmp_path / "directory", "unable to open")
