"""⑥ The engine's side of the ledger: what to compute next, into which slot; what became of it."""

import logging
from dataclasses import dataclass

from slipstream.telemetry.logs import log_event
from target_server import scheduling
from target_server.lease_book import LeaseBook, wait_until
from target_server.shelf import PackFacts, Slot

NOT_FINITE = "hidden states are not finite"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """A pack to compute, and the slot reserved for it."""

    stream: str
    sequence_number: int
    slot: Slot
    documents: tuple[int, ...] | None = None
    """The slot holds all but these documents of the pack already, and they alone need be computed. None: all do."""


class WorkQueue:
    """What the engine thread asks and reports. Thread-safe."""

    def __init__(self, book: LeaseBook) -> None:
        self._book = book
        self._turn = 0
        self._closed = False

    def next_work(self, max_wait: float = float("inf")) -> Work | None:
        """Wait for demand and reserve a slot; None when there is none for so long, or after `close`."""
        book = self._book
        with book.lock:
            deadline = book.clock() + max_wait
            while not self._closed:
                book.expire()
                work = None if book.draining else self._choose()
                if work is not None or book.clock() >= deadline:
                    return work
                wait_until(book.work, min(deadline, book.next_deadline()), book.clock)
            return None

    def publish(self, work: Work, facts: PackFacts) -> None:
        """The pack lies in its slot, complete."""
        with self._book.lock:
            self._book.shelves[work.stream].publish(work.slot, facts)
            self._book.changed()

    def quarantine(self, work: Work, document_names: tuple[str, ...], why: str = NOT_FINITE) -> None:
        """The pack cannot be computed: no run of the stream ever gets it, and the log says so.

        Args:
            work: the pack.
            document_names: its documents, for people to look at.
            why: in words.
        """
        book = self._book
        with book.lock:
            book.shelves[work.stream].discard(work.slot)
            book.unusable[work.stream][work.sequence_number] = document_names
            for member in book.members(work.stream):
                if member.needs(work.sequence_number):
                    book.quarantine(member, work.sequence_number)
            book.changed()
        log_event(
            _log, "warning", "pack_quarantined", stream=work.stream, sequence_number=work.sequence_number,
            why=why, documents=document_names,
        )  # fmt: skip

    def abandon(self, work: Work) -> None:
        """The pack was not computed; its slot is empty."""
        with self._book.lock:
            self._book.shelves[work.stream].discard(work.slot)
            self._book.changed()

    def close(self) -> None:
        """`next_work` returns None from now on."""
        with self._book.lock:
            self._closed = True
            self._book.work.notify_all()

    def _choose(self) -> Work | None:
        """The convoy that was served least recently goes first."""
        candidates = []
        for stream, shelf in self._book.shelves.items():
            grouped = scheduling.convoys(self._book.active(stream), len(shelf))
            candidates += [(max(member.served for member in convoy), stream, convoy, grouped) for convoy in grouped]
        for _, stream, convoy, grouped in sorted(candidates, key=lambda candidate: candidate[0]):
            shelf = self._book.shelves[stream]
            choice = scheduling.choose(shelf, convoy, grouped)
            if choice is not None:
                self._turn += 1
                for member in convoy:
                    member.served = self._turn
                shelf.reserve(choice.slot, choice.sequence_number)
                return Work(stream, choice.sequence_number, choice.slot)
        return None
