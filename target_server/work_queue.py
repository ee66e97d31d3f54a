"""⑥ The engine's side of the ledger: what to compute next, into which slot; what became of it."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.telemetry.logs import log_event
from target_server import scheduling
from target_server.fair_share import FairShare, Offer
from target_server.lease_book import LeaseBook, wait_until
from target_server.pace import leave_behind, rejoin
from target_server.shelf import PackFacts, Shelf, Slot
from target_server.subscription import Subscription

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
    """What engines ask and report. Thread-safe."""

    def __init__(self, book: LeaseBook) -> None:
        self._book = book
        self._share = FairShare()
        self._closed = False
        self._patience_ends = float("inf")
        """When a run that is held up now will have lost its patience."""

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
                wait_until(book.work, min(deadline, book.next_deadline(), self._patience_ends), book.clock)
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
        # Before the runs hear of it: whoever is told that a pack was set aside finds the reason in the log.
        log_event(
            _log, "warning", "pack_quarantined", stream=work.stream, sequence_number=work.sequence_number,
            why=why, documents=document_names,
        )  # fmt: skip
        book = self._book
        with book.lock:
            book.shelves[work.stream].discard(work.slot)
            book.unusable[work.stream][work.sequence_number] = document_names
            for member in book.members(work.stream):
                if member.needs(work.sequence_number):
                    book.quarantine(member, work.sequence_number)
            book.changed()

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
        book = self._book
        self._patience_ends = float("inf")
        shelves = [(name, shelf) for name, shelf in book.shelves.items() if name not in book.held_streams]
        offer = None
        for find in (self._offers, self._offers_ahead):
            offers = [offer for stream, shelf in shelves for offer in find(stream, shelf)]
            offer = self._share.take(offers, book.subscriptions.values())
            if offer is not None:
                break
        else:
            return None
        sequence_number, slot = offer.choice.sequence_number, offer.choice.slot
        book.shelves[offer.stream].reserve(slot, sequence_number)
        return Work(offer.stream, sequence_number, slot)

    def _offers(self, stream: str, shelf: Shelf) -> list[Offer]:
        """What each convoy of a stream would have computed next. Leaves behind who has held others up for too long."""
        active = list(self._book.active(stream))
        self._let_go(member for member in self._book.members(stream) if member not in active)
        rejoin(active, len(shelf))
        while True:
            convoys = scheduling.convoys(active, len(shelf))
            holdings = scheduling.Holdings(shelf, convoys)
            offers = []
            for convoy in convoys:
                choice = scheduling.choose(shelf, convoy, holdings)
                held = [] if choice is not None else self._held(shelf, convoy)
                self._note_pace(convoy, held)
                if len(convoys) < len(shelf) and leave_behind(convoy, held, self._book.limits.patience):
                    slow = [each.record.name for each in convoy if each.low == convoy[0].low]
                    log_event(_log, "info", "runs_left_behind", stream=stream, subscriptions=slow)
                    break
                if choice is not None:
                    offers.append(_offer(stream, shelf, choice))
            else:
                return offers

    def _offers_ahead(self, stream: str, shelf: Shelf) -> list[Offer]:
        """What each convoy of a stream is going to ask for."""
        convoys = scheduling.convoys(self._book.active(stream), len(shelf))
        holdings = scheduling.Holdings(shelf, convoys)
        ahead = self._book.limits.ahead
        choices = (scheduling.choose_ahead(shelf, convoy, holdings, ahead) for convoy in convoys)
        return [_offer(stream, shelf, choice) for choice in choices if choice is not None]

    def _held(self, shelf: Shelf, convoy: scheduling.Convoy) -> list[Subscription]:
        """Members that want a pack for which there is no slot."""
        return [member for member in convoy if scheduling.next_missing(shelf, [member]) is not None]

    def _let_go(self, away: Iterable[Subscription]) -> None:
        """Nobody holds up a run that is paused or away, however long that lasts."""
        for member in away:
            if member.pace.is_held:
                member.pace.note(False, self._book.clock(), self._book.limits.patience)

    def _note_pace(self, convoy: scheduling.Convoy, held: list[Subscription]) -> None:
        now, patience = self._book.clock(), self._book.limits.patience
        for member in convoy:
            member.pace.note(member in held, now, patience)
            if member in held and member.low > convoy[0].low:
                self._patience_ends = min(self._patience_ends, now + patience - member.pace.held_up)


def _offer(stream: str, shelf: Shelf, choice: scheduling.Choice) -> Offer:
    needed = [each for each in choice.convoy if each.needs(choice.sequence_number)]
    return Offer(stream, choice, shelf.pack_cost, [each for each in needed if scheduling.may_be_served(each)])
