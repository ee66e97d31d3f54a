"""⑥ What the lease ledger knows, behind one lock: subscriptions, shelves, leases, and the rules that time imposes.

LeaseLedger (trainers), WorkQueue (engine), StreamShelves (catalog) and StreamControl (operators) are the verbs on it;
each takes `lock`, and calls the methods below while holding it. `packs` wakes long polls, `work` wakes the engine.
"""

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from target_server.shelf import Shelf, Slot
from target_server.subscription import Lease, SkippedSteps, Subscription, SubscriptionRecord

_log = logging.getLogger(__name__)
_TOKEN = re.compile(rb"[0-9a-f]+/(?P<incarnation>[0-9]{1,18})/[0-9]+/(?P<name>[!-~]+)")
"""As `grant` writes them."""


class DeliveryState(Enum):
    """What a trainer is told when it asks for packs."""

    ACTIVE = auto()
    PAUSED = auto()
    EXHAUSTED = auto()
    DRAINING = auto()
    WAITING_FOR_GROUP = auto()


class Journal(Protocol):
    """Where the durable part goes: see LedgerStore."""

    def subscriptions(self) -> list[SubscriptionRecord]:
        """All that are not closed."""

    def find(self, name: str) -> SubscriptionRecord | None:
        """One that was saved, closed or not."""

    def save(self, record: SubscriptionRecord) -> None:
        """Write the record."""

    def seek(self, record: SubscriptionRecord, before: SubscriptionRecord, skipped: SkippedSteps) -> None:
        """Write the record and the incarnation it begins; the `skipped` steps count as committed by the one before."""

    def commit(self, record: SubscriptionRecord, step: int, packs: range) -> None:
        """Write that a step trained its packs."""


PACKS_AHEAD = 2
"""Of an engine: the one that its device computes, and the one that is launched behind it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the ledger allows."""

    subscription_timeout: float = 30.0
    """Seconds without a call after which a run no longer pins packs."""
    max_outstanding: int = 8
    """Leases of one subscription that are neither confirmed nor released."""
    longest_lease: float = 600.0
    """Seconds."""
    ahead: int = PACKS_AHEAD
    """Packs computed for a run beyond those it has room for, where nothing else is wanted. An engine that waited for
    the trainer to ask again would leave its device idle while it launches the next pack."""
    patience: float = 10.0
    """Seconds for which slower runs of its stream may hold a run up, beyond as many in which they did not."""


class LeaseBook:
    """The state of all open subscriptions of one target server. Every method is called with `lock` held.

    Closed ones are in the journal alone: a server outlives any number of runs.
    """

    def __init__(
        self, journal: Journal, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.journal = journal
        self.limits = limits or Limits()
        self.clock = clock
        self.lock = threading.Lock()
        self.packs = threading.Condition(self.lock)
        self.work = threading.Condition(self.lock)
        self.draining = False
        self.shelves: dict[str, Shelf] = {}
        self.held_streams: set[str] = set()
        """Streams whose shelf is about to be exchanged: nothing is computed for them."""
        self.horizons: dict[str, int | None] = {}
        """Stream → where its farthest cursor may be; None: anywhere."""
        self.unusable: dict[str, dict[int, tuple[str, ...]]] = {}
        """Stream → packs with hidden states that are not finite → names of their documents."""
        self.subscriptions = {record.name: Subscription(record) for record in journal.subscriptions()}
        self.leases: dict[bytes, Lease] = {}
        self._looked_at = clock()
        """When `expire` was called last."""
        self._server = secrets.token_hex(4)
        self._serial = 0

    # Finding and checking

    def subscription(self, name: str) -> Subscription:
        """An open subscription.

        Raises:
            SlipstreamError: SUBSCRIPTION_UNKNOWN, STREAM_CLOSED.
        """
        subscription = self.subscriptions.get(name)
        if subscription is not None:
            return subscription
        if self.journal.find(name) is not None:
            raise closed(name)
        raise SlipstreamError(
            f"This target server has no subscription {name!r}.",
            reason=Reason.SUBSCRIPTION_UNKNOWN,
            remedy="Open it first; a server with a new ledger does not remember it.",
        )

    def current(self, name: str, incarnation: int) -> Subscription:
        """An open subscription whose present incarnation is the caller's.

        Raises:
            SlipstreamError: SUBSCRIPTION_UNKNOWN, STREAM_CLOSED, INCARNATION_STALE.
        """
        subscription = self.subscription(name)
        if incarnation != subscription.record.incarnation or incarnation == 0:
            raise stale(name, incarnation, subscription.record.incarnation)
        return subscription

    def refuse_void_token(self, token: bytes, *, of_other_servers: bool) -> None:
        """Raise why a token is void, unless its lease simply expired.

        Args:
            token: not among `leases`.
            of_other_servers: raise for the token of an earlier process, too.

        Raises:
            SlipstreamError: INCARNATION_STALE, STREAM_CLOSED; LEASE_LOST for a token that this process never gave;
                SPEC_INVALID for one that only looks like one of this process's.
        """
        if token.startswith(f"{self._server}/".encode()):
            given = _TOKEN.fullmatch(token)
            if given is None:
                raise SlipstreamError(
                    f"{token[:100]!r} is no lease token.",
                    reason=Reason.SPEC_INVALID,
                    remedy="Give tokens back as they were granted.",
                )
            self.current(given["name"].decode(), int(given["incarnation"]))
        elif of_other_servers:
            raise SlipstreamError(
                "The lease was granted by another server process; leases do not outlive it.",
                reason=Reason.LEASE_LOST,
                remedy="Seek, then lease again.",
            )

    def present(self, subscription: Subscription) -> bool:
        """The run called lately or is waiting now, and has neither left since nor been closed."""
        if subscription.record.closed or subscription.last_seen == float("-inf"):
            return False
        return subscription.waiting > 0 or self.clock() < self._silent_from(subscription)

    def active(self, stream: str) -> Iterator[Subscription]:
        """The runs whose needs count: present, not paused, not waiting for their group."""
        for subscription in self.members(stream):
            record = subscription.record
            if record.started and not record.paused and self.present(subscription):
                yield subscription

    def members(self, stream: str) -> Iterator[Subscription]:
        """All open subscriptions of a stream."""
        return (each for each in self.subscriptions.values() if each.record.stream == stream)

    def state(self, subscription: Subscription) -> DeliveryState:
        """What holds the run up, if anything. Completes its group when all members are there."""
        if self.draining:
            return DeliveryState.DRAINING
        if subscription.record.paused:
            return DeliveryState.PAUSED
        if not self._group_is_complete(subscription):
            return DeliveryState.WAITING_FOR_GROUP
        return DeliveryState.EXHAUSTED if subscription.exhausted else DeliveryState.ACTIVE

    def _group_is_complete(self, subscription: Subscription) -> bool:
        if subscription.record.started:
            return True
        terms = subscription.record.terms
        members = [
            each
            for each in self.members(subscription.record.stream)
            if each.record.terms.group == terms.group and self.present(each)
        ]
        if len(members) < terms.group_size:
            return False
        for member in members:
            started = replace(member.record, started=True)
            self.journal.save(started)
            member.record = started
        self.changed()
        return True

    # Changing

    def touch(self, subscription: Subscription) -> None:
        """The run has called."""
        subscription.last_seen = self.clock()

    def changed(self) -> None:
        """Something happened that long polls or the engine may wait for."""
        self.packs.notify_all()
        self.work.notify_all()

    def grant(self, subscription: Subscription, slot: Slot, time_to_live: float) -> Lease:
        """undelivered → leased."""
        assert slot.facts is not None
        record, sequence_number = subscription.record, slot.sequence_number
        self._serial += 1
        token = f"{self._server}/{record.incarnation}/{self._serial}/{record.name}".encode()
        lease = Lease(
            token=token,
            subscription=record.name,
            stream=record.stream,
            sequence_number=sequence_number,
            step=subscription.step_of(sequence_number),
            attempt=subscription.attempts.get(sequence_number, 0) + 1,
            slot=slot,
            facts=slot.facts,
            time_to_live=self.clamp(time_to_live),
            expires_at=self.clock() + self.clamp(time_to_live),
        )
        slot.readers += 1
        self.leases[token] = lease
        subscription.take(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """Take the lease out of the book; its subscription is told by the caller."""
        del self.leases[lease.token]
        lease.slot.readers -= 1

    def void(self, subscription: Subscription) -> None:
        """End every lease of a subscription; its packs are undelivered."""
        for lease in list(subscription.leased.values()):
            self.end(lease)
            subscription.give_back(lease)

    def expire(self) -> None:
        """End the leases whose time is up."""
        self._looked_at = now = self.clock()
        expired = [lease for lease in self.leases.values() if lease.expires_at <= now]
        for lease in expired:
            subscription = self.subscriptions[lease.subscription]
            self.end(lease)
            subscription.give_back(lease)
            subscription.leases_expired += 1
        if expired:
            self.changed()

    def quarantine(self, subscription: Subscription, sequence_number: int) -> None:
        """Never deliver the pack to this run.

        An engine calls this too, and what it cannot bear is an error: one that cannot be written is said, and known as
        long as this process lives. The run's cursor has it from the trainer, and the next server finds the pack anew.
        """
        lease = subscription.leased.get(sequence_number)
        if lease is not None:
            self.end(lease)
            subscription.give_back(lease)
        subscription.quarantine(sequence_number)
        try:
            self.journal.save(subscription.record)
        except SlipstreamError as error:
            log_event(
                _log, "warning", "quarantine_not_saved", subscription=subscription.record.name,
                sequence_number=sequence_number, reason=error.reason.value, detail=error.message,
            )  # fmt: skip

    def next_deadline(self) -> float:
        """When time alone changes something after `expire`: a lease runs out, or a run counts as away.

        It may be over by now: what the caller has decided since holds for the time of `expire`.
        """
        deadlines = [lease.expires_at for lease in self.leases.values()]
        deadlines += [self._silent_from(each) for each in self.subscriptions.values()]
        return min((deadline for deadline in deadlines if deadline > self._looked_at), default=float("inf"))

    def clamp(self, time_to_live: float) -> float:
        """A lease's duration within what the server allows; not positive means the longest."""
        longest = self.limits.longest_lease
        return min(time_to_live, longest) if time_to_live > 0 else longest

    def _silent_from(self, subscription: Subscription) -> float:
        return subscription.last_seen + self.limits.subscription_timeout


def wait_until(condition: threading.Condition, deadline: float, clock: Callable[[], float]) -> None:
    """Wait for a notification, at the longest until `deadline` on `clock`."""
    condition.wait(min(max(0.0, deadline - clock()), threading.TIMEOUT_MAX))


def stale(name: str, given: int, present: int) -> SlipstreamError:
    """The caller's incarnation is not the present one."""
    if given == 0 or present == 0:
        return SlipstreamError(
            f"{name} was not sought in this incarnation.",
            reason=Reason.INCARNATION_STALE,
            remedy="Seek before anything else.",
        )
    return SlipstreamError(
        f"Incarnation {given} of {name} is over; the present one is {present}.",
        reason=Reason.INCARNATION_STALE,
        remedy="Another trainer has taken over the run: this one stops and writes nothing.",
    )


def closed(name: str) -> SlipstreamError:
    """The subscription was closed by an operator."""
    return SlipstreamError(
        f"{name} was closed.", reason=Reason.STREAM_CLOSED, remedy="Start the trainer again to open it anew."
    )
