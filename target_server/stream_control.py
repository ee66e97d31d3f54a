"""⑥ The operator's side of the ledger: pause, resume, close, drain, and the counters."""

from dataclasses import dataclass, replace

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.lease_book import LeaseBook, wait_until
from target_server.shelf import Shelf
from target_server.subscription import Subscription


@dataclass(frozen=True, slots=True)
class SubscriptionCounters:
    """One subscription, counted since the server started, except for packs_committed."""

    name: str
    packs_leased: int
    packs_committed: int
    leases_expired: int
    packs_quarantined: int
    lag_packs: int
    """How far its cursor is behind the newest pack computed."""
    trainer_wait_seconds: float
    """In which it waited for a pack, polls that wait now included."""
    serving_seconds: float
    """Since its first lease."""
    paused: bool
    """Whether its packs are held back."""

    @property
    def trainer_wait_ratio(self) -> float:
        """Share of the time since its first lease that it waited for a pack."""
        return min(1.0, self.trainer_wait_seconds / self.serving_seconds) if self.serving_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StreamCounters:
    """One stream, counted since its shelf was made."""

    stream: str
    packs_ready: int
    shelf_size_bytes: int
    shelf_capacity_bytes: int
    packs_computed: int
    packs_recomputed: int
    subscriptions: tuple[SubscriptionCounters, ...]


class StreamControl:
    """The operator's verbs. Thread-safe."""

    def __init__(self, book: LeaseBook) -> None:
        self._book = book

    def pause(self, name: str) -> None:
        """Grant no leases to the run and let it pin nothing; leases it holds stay valid.

        Raises:
            SlipstreamError: SUBSCRIPTION_UNKNOWN, STREAM_CLOSED, LEDGER_UNWRITABLE.
        """
        self._set_paused(name, True)

    def resume(self, name: str) -> None:
        """Undo `pause`.

        Raises:
            SlipstreamError: SUBSCRIPTION_UNKNOWN, STREAM_CLOSED, LEDGER_UNWRITABLE.
        """
        self._set_paused(name, False)

    def close(self, name: str) -> None:
        """End the subscription: its leases are void and its trainers are told STREAM_CLOSED. Idempotent.

        Raises:
            SlipstreamError: SUBSCRIPTION_UNKNOWN, LEDGER_UNWRITABLE.
        """
        book = self._book
        with book.lock:
            if name not in book.subscriptions and book.journal.find(name) is not None:
                return
            subscription = book.subscription(name)
            closed = replace(subscription.record, closed=True)
            book.journal.save(closed)
            book.void(subscription)
            subscription.record = closed  # for the polls that wait on it
            del book.subscriptions[name]
            book.changed()

    def drain(self) -> None:
        """Grant no lease and compute no pack from now on; leases that are out stay valid."""
        with self._book.lock:
            self._book.draining = True
            self._book.changed()

    def wait_until_drained(self, max_wait: float) -> bool:
        """Wait for the leases that are out; false when some are left after so many seconds."""
        book = self._book
        with book.lock:
            deadline = book.clock() + max_wait
            while True:
                book.expire()
                if not book.leases or book.clock() >= deadline:
                    return not book.leases
                wait_until(book.packs, min(deadline, book.next_deadline()), book.clock)

    def streams(self) -> list[str]:
        """Every stream on a shelf."""
        with self._book.lock:
            return sorted(self._book.shelves)

    def counters(self, stream: str, *, of_subscription: str = "") -> StreamCounters:
        """Counters of one stream, or of the one that a subscription reads, and of its open subscriptions.

        Raises:
            SlipstreamError: SUBSCRIPTION_UNKNOWN when no such stream is on a shelf, or there is no such subscription;
                STREAM_CLOSED when the subscription was closed.
        """
        book = self._book
        with book.lock:
            book.expire()
            if of_subscription:
                stream = book.subscription(of_subscription).record.stream
            shelf = book.shelves.get(stream)
            if shelf is None:
                raise SlipstreamError(
                    f"This target server serves no stream {stream!r}.",
                    reason=Reason.SUBSCRIPTION_UNKNOWN,
                    remedy=f"Streams served now: {', '.join(sorted(book.shelves)) or 'none'}.",
                )
            ready = sum(1 for _ in shelf.ready_slots())
            return StreamCounters(
                stream=stream,
                packs_ready=ready,
                shelf_size_bytes=ready * shelf.slot_bytes,
                shelf_capacity_bytes=len(shelf) * shelf.slot_bytes,
                packs_computed=shelf.packs_computed,
                packs_recomputed=shelf.packs_recomputed,
                subscriptions=tuple(self._subscription_counters(member, shelf) for member in book.members(stream)),
            )

    def _subscription_counters(self, subscription: Subscription, shelf: Shelf) -> SubscriptionCounters:
        record = subscription.record
        since = subscription.serving_since
        now = self._book.clock()
        return SubscriptionCounters(
            name=record.name,
            packs_leased=subscription.packs_leased,
            packs_committed=record.next_step * record.terms.packs_per_step,
            leases_expired=subscription.leases_expired,
            packs_quarantined=len(record.quarantined),
            lag_packs=max(0, shelf.newest_sequence_number + 1 - subscription.low) if shelf.packs_computed else 0,
            trainer_wait_seconds=subscription.waited(now),
            serving_seconds=now - since if since is not None else 0.0,
            paused=record.paused,
        )

    def _set_paused(self, name: str, paused: bool) -> None:
        book = self._book
        with book.lock:
            subscription = book.subscription(name)
            changed = replace(subscription.record, paused=paused)
            book.journal.save(changed)
            subscription.record = changed
            book.changed()
