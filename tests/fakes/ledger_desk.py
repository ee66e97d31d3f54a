"""A lease ledger with a clock that stands still and an engine that runs when told: interleavings are plain calls."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from target_server.lease_book import LeaseBook, Limits
from target_server.lease_ledger import Ask, Grant, LeaseLedger, SeekTo
from target_server.ledger_store import LedgerStore
from target_server.shelf import PackFacts, Shelf
from target_server.stream_control import StreamControl
from target_server.stream_shelves import StreamShelves
from target_server.subscription import Start, SubscriptionTerms
from target_server.work_queue import WorkQueue

STREAM = "streams/test"
FINGERPRINT = "target-a"


def terms(
    run: str, *, packs_per_step: int = 1, group: str = "", group_size: int = 0, **changes: object
) -> SubscriptionTerms:
    """Terms of a run on layers 1 and 3."""
    start = Start.GROUP if group else Start.BEGINNING
    fields: dict[str, object] = {
        "data_spec_json": json.dumps({"files": ["a.jsonl"], "seed": 0}),
        "layer_ids": (1, 3),
        "last_hidden_state": False,
        "packs_per_step": packs_per_step,
        "start": start,
        "group": group,
        "group_size": group_size,
        "max_epochs": 1,
    }
    return SubscriptionTerms(run=run, **(fields | changes))  # type: ignore[arg-type]


@contextlib.contextmanager
def full_disk(store: LedgerStore) -> Iterator[None]:
    """There is no room for any row, as on a full disk. Enter and leave it under the ledger's lock, where one is."""
    connection = store._connection
    tables = ("subscriptions", "incarnations", "commits")
    connection.execute("CREATE TABLE filler (x)")
    for table in tables:
        large = "INSERT INTO filler VALUES (zeroblob(1000000))"
        connection.execute(f"CREATE TEMP TRIGGER full_{table} BEFORE INSERT ON main.{table} BEGIN {large}; END")
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    yield
    for table in tables:
        connection.execute(f"DROP TRIGGER full_{table}")
    connection.execute(f"PRAGMA max_page_count = {2**30}")
    connection.execute("DROP TABLE filler")


@contextlib.contextmanager
def locked_by_another_program(store: LedgerStore) -> Iterator[None]:
    """Somebody has begun to write into the file, and does not end."""
    blocker = sqlite3.connect(store.path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    yield
    blocker.execute("ROLLBACK")
    blocker.close()


class LedgerDesk:
    """One stream of `num_packs` packs on a shelf of `num_slots` slots."""

    def __init__(
        self,
        path: Path,
        *,
        num_slots: int = 4,
        num_packs: int | None = 100,
        max_outstanding: int = 8,
        ahead: int = 0,
    ) -> None:
        """`ahead`: 0, other than a server's, so that what is computed is what was asked for."""
        self.now = 0.0
        self.num_packs = num_packs
        self.store = LedgerStore(path)
        self.book = LeaseBook(self.store, Limits(max_outstanding=max_outstanding, ahead=ahead), clock=lambda: self.now)
        self.ledger = LeaseLedger(self.book)
        self.queue = WorkQueue(self.book)
        self.control = StreamControl(self.book)
        self.shelf = Shelf(num_slots, 64)
        self.shelves = StreamShelves(self.book)
        self.shelves.add(STREAM, self.shelf)
        self.computed: list[int] = []
        self.slot_contents: dict[int, int] = {}
        self._generation = 0

    def open(self, run: str, **changes: object) -> str:
        """Subscribe a run; returns the subscription's name."""
        return self.ledger.open(terms(run, **changes), STREAM, FINGERPRINT, self.num_packs).name  # type: ignore[arg-type]

    def join(self, run: str, *, next_step: int = 0, **changes: object) -> tuple[str, int]:
        """Subscribe a run and seek; returns the subscription and its incarnation."""
        name = self.open(run, **changes)
        return name, self.seek(name, next_step)

    def seek(self, name: str, next_step: int, **changes: object) -> int:
        """Seek as the owner of the present incarnation."""
        expected = self.book.subscriptions[name].record.incarnation
        first = self.book.subscriptions[name].record.first_sequence_number
        return self.ledger.seek(name, SeekTo(next_step, first, expected, **changes))  # type: ignore[arg-type]

    def ask(
        self, name: str, incarnation: int, packs: int = 1, *, time_to_live: float = 60.0, end: int | None = None
    ) -> Grant:
        """Ask without waiting."""
        return self.ledger.lease(name, Ask(incarnation, packs, 0.0, time_to_live, end))

    def get(self, name: str, incarnation: int, packs: int = 1) -> list[int]:
        """Ask, let the engine work, ask again, confirm all; returns what was delivered."""
        grant = self.ask(name, incarnation, packs)
        if not grant.leases:
            self.work()
            grant = self.ask(name, incarnation, packs)
        for lease in grant.leases:
            assert self.ledger.confirm(lease.token, lease.facts.generation)
        return [lease.sequence_number for lease in grant.leases]

    def work(self, packs: int | None = None) -> list[int]:
        """Let the engine compute what is wanted (at most `packs`); returns what it computed."""
        computed: list[int] = []
        while packs is None or len(computed) < packs:
            work = self.queue.next_work(max_wait=0.0)
            if work is None:
                break
            self._generation += 2
            self.slot_contents[work.slot.index] = work.sequence_number
            self.queue.publish(work, PackFacts(100, 50, self._generation))
            computed.append(work.sequence_number)
        self.computed += computed
        return computed

    def unwritable(self) -> contextlib.AbstractContextManager[None]:
        """Nothing can be written into the file."""
        return locked_by_another_program(self.store)

    def pass_time(self, seconds: float) -> None:
        """Move the clock."""
        self.now += seconds

    def close(self) -> None:
        """Close the file."""
        self.store.close()
