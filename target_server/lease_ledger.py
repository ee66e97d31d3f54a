"""⑥ The lease ledger: who may read which pack, who has got which, which steps are committed. The trainer's verbs.

Promises, whatever the order of calls: inside one subscription a pack is leased to one trainer at a time and packs are
delivered in order; after a seek nothing that an older incarnation holds has any effect; a slot is never rewritten under
an unexpired lease; a run that stands still holds the others up for `Limits.patience` at most, because every active run
has guaranteed slots and a share of the target's time. No bytes, no gRPC, no torch here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server import admission
from target_server.lease_book import DeliveryState, LeaseBook, stale, wait_until
from target_server.scheduling import may_pin
from target_server.subscription import Lease, Start, Subscription, SubscriptionRecord, SubscriptionTerms

STRIKES_TO_QUARANTINE = 2
"""A pack that failed so often by its own fault is not delivered again."""


@dataclass(frozen=True, slots=True)
class SeekTo:
    """The cursor of a checkpoint."""

    next_step: int
    first_sequence_number: int
    expected_incarnation: int
    lineage_incarnation: int = 0
    quarantined: frozenset[int] = frozenset()
    request_id: str = ""
    """A retry with the id of the seek that made the present incarnation gets that incarnation again."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a trainer asks for."""

    incarnation: int
    max_packs: int = 1
    """Room it has; what is not granted now is credit: the engine computes it meanwhile."""
    max_wait: float = 0.0
    """Seconds to wait while there is nothing."""
    time_to_live: float = 60.0
    end: int | None = None
    """One past the last pack that it will ever ask for: nothing behind it is computed early. None: not known."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What it gets."""

    leases: tuple[Lease, ...]
    state: DeliveryState
    quarantined: tuple[int, ...]
    """Packs of this run, from its cursor on, that will never come."""


class LeaseLedger:
    """The trainer's verbs. Thread-safe."""

    def __init__(self, book: LeaseBook) -> None:
        self._book = book

    def wanted_by(self, name: str) -> tuple[str, SubscriptionTerms]:
        """The stream that a run reads, and what it asked for.

        Raises:
            SlipstreamError: SUBSCRIPTION_UNKNOWN, STREAM_CLOSED.
        """
        with self._book.lock:
            record = self._book.subscription(name).record
            return record.stream, record.terms

    def open(self, terms: SubscriptionTerms, stream: str, fingerprint: str, end: int | None) -> SubscriptionRecord:
        """Subscribe a run, or find its subscription; the stream was added before. Idempotent.

        Args:
            terms: what the run asks for.
            stream: the stream that its data specification gives.
            fingerprint: the target's.
            end: one past the last pack of the stream for this run; None when it repeats for ever.

        Raises:
            SlipstreamError: STREAM_CHANGED when the run was opened on other terms; TARGET_FINGERPRINT_MISMATCH;
                SPEC_INVALID for a group that does not fit, or a live start beyond the end; TARGET_LOADING for a live
                start in a stream that has left its shelf meanwhile; LEDGER_UNWRITABLE.
        """
        book = self._book
        with book.lock:
            name = f"subscriptions/{terms.run}"
            subscription = book.subscriptions.get(name)
            others = [each for each in book.subscriptions.values() if each.record.name != name and book.present(each)]
            if subscription is not None:
                admission.check_same_run(subscription.record, terms, stream, fingerprint)
                record = replace(subscription.record, terms=terms)
            else:
                admission.check_group(terms, stream, others)
                first = self._first_sequence_number(terms, stream, end)
                # Closed, then opened anew: whoever trained before the close is fenced off.
                closed = book.journal.find(name)
                incarnation = closed.incarnation + 1 if closed is not None else 0
                started = terms.start is not Start.GROUP
                record = SubscriptionRecord(name, terms, stream, fingerprint, first, incarnation, started=started)
                subscription = Subscription(record)
            # First on the disk: what could not be written has not happened.
            book.journal.save(record)
            subscription.record = record
            book.subscriptions[name] = subscription
            subscription.end = end
            book.touch(subscription)
            book.changed()
            return subscription.record

    def seek(self, name: str, to: SeekTo) -> int:
        """Move the run to the cursor of a checkpoint and start a new incarnation; returns its number.

        Steps before the cursor that the present incarnation has not committed count as committed: the caller's weights
        contain them, and only the answer to their commit was lost.

        Raises:
            SlipstreamError: INCARNATION_STALE when another trainer has taken the run over; SPEC_INVALID;
                LEDGER_UNWRITABLE: nothing has happened, ask again.
        """
        book = self._book
        with book.lock:
            subscription = book.subscription(name)
            record = subscription.record
            if to.request_id and to.request_id == record.seek_request_id:
                return record.incarnation
            if to.expected_incarnation < record.incarnation:
                raise stale(name, to.expected_incarnation, record.incarnation)
            boundary = to.first_sequence_number + to.next_step * record.terms.packs_per_step
            horizon = book.horizons.get(record.stream)
            admission.check_cursor(subscription, to.first_sequence_number, to.next_step, horizon)
            admission.check_lineage(to.lineage_incarnation)
            same_grid = record.incarnation and record.first_sequence_number == to.first_sequence_number
            skipped = range(record.next_step, to.next_step) if same_grid else range(0)
            admission.check_skipped(record, len(skipped))
            unusable = {number for number in book.unusable.get(record.stream, {}) if number >= boundary}
            sought = replace(
                record,
                incarnation=max(record.incarnation, to.lineage_incarnation) + 1,
                seek_request_id=to.request_id,
                first_sequence_number=to.first_sequence_number,
                next_step=to.next_step,
                quarantined=set(to.quarantined) | unusable,
            )
            # First on the disk: a seek that could not be written has not happened.
            book.journal.seek(sought, record, ((step, subscription.packs_of(step)) for step in skipped))
            book.void(subscription)
            subscription.record = sought
            subscription.rewind()
            book.touch(subscription)
            book.changed()
            return sought.incarnation

    def lease(self, name: str, ask: Ask, cancelled: Callable[[], bool] = lambda: False) -> Grant:
        """The lowest packs the run has not got, in order; waits up to `ask.max_wait` for the first.

        Args:
            name: the subscription.
            ask: what is asked for.
            cancelled: true when the caller has hung up; `wake` after it changes.

        Raises:
            SlipstreamError: INCARNATION_STALE, STREAM_CLOSED, SUBSCRIPTION_UNKNOWN, LEASE_QUOTA_EXCEEDED;
                LEDGER_UNWRITABLE where a group begins with it.
        """
        book = self._book
        with book.lock:
            subscription = book.current(name, ask.incarnation)
            book.touch(subscription)
            book.expire()
            if len(subscription.leased) >= book.limits.max_outstanding:
                raise SlipstreamError(
                    f"{name} holds {len(subscription.leased)} unconfirmed leases, the limit.",
                    reason=Reason.LEASE_QUOTA_EXCEEDED,
                    remedy="Confirm or release leases before asking for more.",
                )
            began = book.clock()
            if subscription.serving_since is None:
                subscription.serving_since = began
            subscription.begin_wait(began)
            try:
                return self._poll(subscription, ask, began + ask.max_wait, cancelled)
            finally:
                if not self._abandoned(subscription, cancelled):
                    book.touch(subscription)
                subscription.end_wait(book.clock())

    def _poll(self, subscription: Subscription, ask: Ask, deadline: float, cancelled: Callable[[], bool]) -> Grant:
        book = self._book
        while True:
            book.current(subscription.record.name, ask.incarnation)
            book.expire()
            state = book.state(subscription)
            abandoned = self._abandoned(subscription, cancelled)
            leases = () if abandoned else self._grant(subscription, ask, state)
            final = leases or state in (DeliveryState.EXHAUSTED, DeliveryState.DRAINING) or abandoned
            if final or book.clock() >= deadline:
                low = subscription.cursor
                quarantined = sorted(number for number in subscription.record.quarantined if number >= low)
                return Grant(leases, state, tuple(quarantined))
            wait_until(book.packs, min(deadline, book.next_deadline()), book.clock)

    def _abandoned(self, subscription: Subscription, cancelled: Callable[[], bool]) -> bool:
        """The caller of a long poll has hung up, or its run has left meanwhile."""
        return cancelled() or not self._book.present(subscription)

    def _grant(self, subscription: Subscription, ask: Ask, state: DeliveryState) -> tuple[Lease, ...]:
        """Lease what is ready, strictly in order, and leave the rest of the ask as credit."""
        if state is not DeliveryState.ACTIVE:
            return ()
        stream = subscription.record.stream
        shelf = None if stream in self._book.held_streams else self._book.shelves.get(stream)
        room = min(ask.max_packs, self._book.limits.max_outstanding - len(subscription.leased))
        active = list(self._book.active(stream))
        leases: list[Lease] = []
        while shelf is not None and len(leases) < room:
            sequence_number = subscription.next_undelivered()
            slot = None if sequence_number is None else shelf.ready(sequence_number)
            if slot is None or not may_pin(shelf, slot, subscription, active):
                break
            leases.append(self._book.grant(subscription, slot, ask.time_to_live))
        subscription.ask_for(ask.max_packs - len(leases), ask.end)
        self._book.work.notify_all()
        return tuple(leases)

    def reading(self, token: bytes) -> Lease:
        """The lease that a reader's token stands for.

        Raises:
            SlipstreamError: LEASE_LOST, INCARNATION_STALE, STREAM_CLOSED.
        """
        book = self._book
        with book.lock:
            book.expire()
            lease = book.leases.get(token)
            if lease is None:
                book.refuse_void_token(token, of_other_servers=True)
                raise SlipstreamError(
                    "The lease has expired.", reason=Reason.LEASE_LOST, remedy="The pack will be delivered again."
                )
            book.touch(book.subscriptions[lease.subscription])
            return lease

    def holds(self, token: bytes) -> bool:
        """True while the lease counts: its slot is not rewritten meanwhile."""
        with self._book.lock:
            self._book.expire()
            return token in self._book.leases

    def confirm(self, token: bytes, slot_generation: int) -> bool:
        """The pack was copied; false when what was copied is not what was leased. Then it is delivered again.

        Args:
            token: the lease's.
            slot_generation: what the reader saw in the slot; 0 when its transport does not show it.

        Raises:
            SlipstreamError: INCARNATION_STALE, STREAM_CLOSED; LEASE_LOST for a token of a server that is gone.
        """
        book = self._book
        with book.lock:
            book.expire()
            lease = book.leases.get(token)
            if lease is None:
                book.refuse_void_token(token, of_other_servers=True)
                return False
            subscription = book.subscriptions[lease.subscription]
            book.touch(subscription)
            book.end(lease)
            valid = slot_generation in (0, lease.facts.generation)
            if valid:
                subscription.deliver(lease)
            else:
                subscription.give_back(lease)
            book.changed()
            return valid

    def renew(self, tokens: Iterable[bytes], time_to_live: float) -> tuple[list[bytes], DeliveryState | None]:
        """Prolong leases. Returns the tokens that are lost, and the state of the subscription if one was found.

        Raises:
            SlipstreamError: INCARNATION_STALE, STREAM_CLOSED.
        """
        book = self._book
        with book.lock:
            book.expire()
            lost: list[bytes] = []
            state = None
            for token in tokens:
                lease = book.leases.get(token)
                if lease is None:
                    book.refuse_void_token(token, of_other_servers=False)
                    lost.append(token)
                    continue
                lease.expires_at = book.clock() + book.clamp(time_to_live)
                book.touch(book.subscriptions[lease.subscription])
                state = book.state(book.subscriptions[lease.subscription])
            return lost, state

    def release(self, tokens: Iterable[bytes], *, pack_at_fault: bool) -> list[Lease]:
        """Give leases back unread. A pack at fault is computed again, and quarantined the second time.

        Returns the leases whose packs are quarantined now.

        Raises:
            SlipstreamError: INCARNATION_STALE, STREAM_CLOSED.
        """
        book = self._book
        with book.lock:
            book.expire()
            quarantined = []
            try:
                for token in tokens:
                    lease = book.leases.get(token)
                    if lease is None:
                        book.refuse_void_token(token, of_other_servers=False)
                        continue
                    subscription = book.subscriptions[lease.subscription]
                    book.touch(subscription)
                    book.end(lease)
                    subscription.give_back(lease)
                    if pack_at_fault and self._strike(subscription, lease):
                        quarantined.append(lease)
            finally:  # what was given back before a token that is refused can be had
                book.changed()
            return quarantined

    def leave(self, name: str, incarnation: int) -> None:
        """The run ends or pauses in order: from now on it pins no packs and nobody waits for it, until it calls again.

        Raises:
            SlipstreamError: INCARNATION_STALE, STREAM_CLOSED, SUBSCRIPTION_UNKNOWN.
        """
        book = self._book
        with book.lock:
            book.current(name, incarnation).last_seen = float("-inf")
            book.changed()

    def commit(self, name: str, incarnation: int, step: int) -> list[int]:
        """Step `step` is applied. Idempotent. Returns the run's quarantined packs.

        Steps are written in order, each once, so what the ledger holds of an incarnation has no gap. A step before its
        first is part of the weights it began with, and is not written.

        Raises:
            SlipstreamError: INCARNATION_STALE, STREAM_CLOSED, SUBSCRIPTION_UNKNOWN; SPEC_INVALID for a step whose packs
                were not handed out, or one that is not the next; LEDGER_UNWRITABLE: it is not committed, ask again.
        """
        book = self._book
        with book.lock:
            subscription = book.current(name, incarnation)
            admission.check_commit(step, subscription)
            book.touch(subscription)
            if step == subscription.record.next_step:
                book.journal.commit(subscription.record, step, subscription.packs_of(step))
                for lease in subscription.complete_step(step):
                    book.end(lease)
                book.changed()
            return sorted(subscription.record.quarantined)

    def wake(self) -> None:
        """Let every long poll look again whether its caller has hung up."""
        with self._book.lock:
            self._book.packs.notify_all()

    def _strike(self, subscription: Subscription, lease: Lease) -> bool:
        """Count a pack's failure; true when it is quarantined now."""
        shelf = self._book.shelves[subscription.record.stream]
        if shelf.ready(lease.sequence_number) is lease.slot:
            shelf.distrust(lease.slot)
        if subscription.strike(lease.sequence_number) < STRIKES_TO_QUARANTINE:
            return False
        self._book.quarantine(subscription, lease.sequence_number)
        return True

    def _first_sequence_number(self, terms: SubscriptionTerms, stream: str, end: int | None) -> int:
        if terms.start is not Start.LIVE:
            return 0
        shelf = self._book.shelves.get(stream)
        if shelf is None:
            raise SlipstreamError(
                f"{stream} made room for another before run {terms.run} had subscribed.",
                reason=Reason.TARGET_LOADING,
                remedy="Ask again.",
            )
        first = shelf.newest_sequence_number
        admission.check_live_start(first, end, terms)
        return first
