"""⑥ One run's cursor on a stream: which packs it has, which are on the way, which come next.

A pack, seen from one subscription in one incarnation:

    state        event                                   next state
    undelivered  lease granted                           leased
    leased       confirmed                               delivered
    leased       expired, released, not confirmable      undelivered (delivery attempt + 1)
    any          its step committed                      delivered
    any          quarantined                             skipped for good
    any          seek                                    undelivered from the cursor on, delivered before it

Pure bookkeeping without a lock: the lease ledger owns it.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from target_server.pace import Pace
from target_server.shelf import PackFacts, Slot

SkippedSteps = Iterable[tuple[int, range]]
"""Steps with the packs they trained, for which no commit came."""


class Start(StrEnum):
    """Where a new run starts in the stream."""

    BEGINNING = "beginning"
    LIVE = "live"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class SubscriptionTerms:
    """What a run asked for when it subscribed."""

    run: str
    data_spec_json: str
    """Canonical JSON of the run's DataSpec."""
    layer_ids: tuple[int, ...]
    """Zero-based, ascending."""
    last_hidden_state: bool
    packs_per_step: int
    start: Start = Start.BEGINNING
    group: str = ""
    group_size: int = 0
    max_epochs: int = 0
    """0: the stream repeats for ever."""


@dataclass(slots=True)
class SubscriptionRecord:
    """What of a subscription must survive a crash of the server."""

    name: str
    terms: SubscriptionTerms
    stream: str
    fingerprint: str
    """Of the target that the run was opened on."""
    first_sequence_number: int = 0
    incarnation: int = 0
    """0 until the first seek."""
    seek_request_id: str = ""
    """Of the seek that began the present incarnation: the same seek again is a retry."""
    next_step: int = 0
    """First step that is not committed."""
    quarantined: set[int] = field(default_factory=set)
    paused: bool = False
    closed: bool = False
    started: bool = False
    """The group was complete once; true at once without a group."""


@dataclass(slots=True)
class Lease:
    """The right to read one pack for a while."""

    token: bytes
    subscription: str
    stream: str
    sequence_number: int
    step: int
    attempt: int
    """1 on first delivery."""
    slot: Slot
    facts: PackFacts
    """Of the slot's content when it was leased."""
    time_to_live: float
    expires_at: float
    """On the ledger's clock."""


class Subscription:
    """The durable record and what only lives in memory."""

    def __init__(self, record: SubscriptionRecord) -> None:
        self.record = record
        self.end: int | None = None
        """One past the last pack of the stream for this run; None: it repeats for ever. Set when the stream opens."""
        self.last_seen = float("-inf")
        """When it called last; -inf before the first call and once the run has left."""
        self.waiting = 0
        """Long polls in progress."""
        self.served = 0
        """Tick of the last pack computed for it."""
        self.credit = 0.0
        """Its share of the target's time that it has not used; see fair_share.py."""
        self.packs_leased = 0
        self.leases_expired = 0
        self._wait_seconds = 0.0
        """Of the polls that are over."""
        self._waiting_since = 0.0
        """When the oldest poll in progress began."""
        self.serving_since: float | None = None
        self.rewind()
        self.restored = record.incarnation > 0
        """An earlier server handed packs out, nobody knows how many; false from the next seek on."""

    def begin_wait(self, now: float) -> None:
        """A long poll begins."""
        if not self.waiting:
            self._waiting_since = now
        self.waiting += 1

    def end_wait(self, now: float) -> None:
        """A long poll is answered."""
        self.waiting -= 1
        if not self.waiting:
            self._wait_seconds += now - self._waiting_since

    def waited(self, now: float) -> float:
        """Seconds in which at least one long poll was in progress."""
        return self._wait_seconds + (now - self._waiting_since if self.waiting else 0.0)

    def rewind(self) -> None:
        """Start over at the first uncommitted step: whatever was on the way is undelivered again."""
        self.restored = False
        self.pace = Pace()
        self._fresh = self.cursor
        self._horizon = self._fresh
        self._has_asked = False
        self._end_of_asks = float("inf")
        self.leased: dict[int, Lease] = {}
        self.returned: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.strikes: dict[int, int] = {}

    def packs_of(self, step: int) -> range:
        """The packs that a step trains."""
        packs = self.record.terms.packs_per_step
        first = self.record.first_sequence_number + step * packs
        return range(first, first + packs)

    def step_of(self, sequence_number: int) -> int:
        """The step that trains the pack."""
        return (sequence_number - self.record.first_sequence_number) // self.record.terms.packs_per_step

    @property
    def limit(self) -> float:
        """One past the last pack of the last whole step; infinite when the stream repeats."""
        return float("inf") if self.end is None else self.limit_from(self.record.first_sequence_number, self.end)

    def limit_from(self, first_sequence_number: int, end: int) -> int:
        """One past the last pack of the last whole step, if step 0 began at `first_sequence_number`."""
        packs = max(0, end - first_sequence_number)
        return first_sequence_number + packs - packs % self.record.terms.packs_per_step

    def handed_out(self, step: int) -> bool:
        """Every pack of the step was leased in this incarnation, or may have been by a server that is gone."""
        return self.packs_of(step).stop <= self.fresh or (self.restored and step <= self.record.next_step)

    @property
    def cursor(self) -> int:
        """First pack of the first step that is not committed."""
        return self.packs_of(self.record.next_step).start

    @property
    def fresh(self) -> int:
        """Lowest pack that was never leased in this incarnation and is not quarantined."""
        while self._fresh in self.record.quarantined:
            self._fresh += 1
        return self._fresh

    @property
    def low(self) -> int:
        """Lowest pack that is not delivered; beyond the end when all are."""
        return min(itertools.chain(self.returned, self.leased, (self.fresh,)))

    def needs(self, sequence_number: int) -> bool:
        """True until the pack is delivered."""
        if sequence_number in self.leased or sequence_number in self.returned:
            return True
        return self.fresh <= sequence_number < self.limit and sequence_number not in self.record.quarantined

    def next_undelivered(self) -> int | None:
        """The pack to be leased next; None when nothing is left to lease."""
        sequence_number = min(self.returned, default=self.fresh)
        return sequence_number if sequence_number < self.limit else None

    def wanted(self, window: int, ahead: int = 0) -> Iterator[int]:
        """Packs to have on the shelf now, ascending: those asked for, and `ahead` beyond them that will be asked for,
        within `window` packs of the cursor."""
        yield from sorted(self.returned)
        early = min(self._horizon + ahead, self._end_of_asks) if self._has_asked else self._horizon
        end = min(max(self._horizon, early), self.limit, self.low + window)
        for sequence_number in itertools.count(self.fresh):
            if sequence_number >= end:
                return
            if sequence_number not in self.record.quarantined:
                yield sequence_number

    @property
    def asked_up_to(self) -> int:
        """The first pack that it has neither got nor asked for."""
        return max(self._horizon, self.fresh)

    def ask_for(self, packs: int, end: int | None = None) -> None:
        """A trainer has room for so many packs beyond those it was granted: the credit that drives production.

        `end`: one past the last pack that it will ever ask for, where it says so.
        """
        self._has_asked = True
        self._end_of_asks = float("inf") if end is None else end
        self._horizon = max(self._horizon, self.fresh + max(0, packs - len(self.returned)))

    @property
    def exhausted(self) -> bool:
        """Every pack of every whole step is delivered."""
        return self.low >= self.limit

    def take(self, lease: Lease) -> None:
        """undelivered → leased."""
        assert lease.sequence_number not in self.leased
        if lease.sequence_number in self.returned:
            self.returned.remove(lease.sequence_number)
        else:
            assert lease.sequence_number == self.fresh, "packs are leased in order"
            self._fresh += 1
        self.leased[lease.sequence_number] = lease
        self.attempts[lease.sequence_number] = lease.attempt
        self.packs_leased += 1

    def deliver(self, lease: Lease) -> None:
        """leased → delivered."""
        del self.leased[lease.sequence_number]
        self.attempts.pop(lease.sequence_number, None)

    def give_back(self, lease: Lease) -> None:
        """leased → undelivered, unless quarantined meanwhile."""
        del self.leased[lease.sequence_number]
        if lease.sequence_number not in self.record.quarantined:
            self.returned.add(lease.sequence_number)

    def complete_step(self, step: int) -> list[Lease]:
        """The step and all before it are trained; returns the leases that are void with it."""
        self.record.next_step = max(self.record.next_step, step + 1)
        boundary = self.cursor
        self._fresh = max(self._fresh, boundary)
        self._horizon = max(self._horizon, self._fresh)
        self.returned = {number for number in self.returned if number >= boundary}
        self.attempts = {number: count for number, count in self.attempts.items() if number >= boundary}
        void = [lease for number, lease in self.leased.items() if number < boundary]
        for lease in void:
            del self.leased[lease.sequence_number]
        return void

    def quarantine(self, sequence_number: int) -> None:
        """Never deliver the pack. A lease on it must have been given back before."""
        assert sequence_number not in self.leased
        self.record.quarantined.add(sequence_number)
        self.returned.discard(sequence_number)
        self.attempts.pop(sequence_number, None)

    def strike(self, sequence_number: int) -> int:
        """Count a failure that was the pack's own fault; returns how many there were."""
        self.strikes[sequence_number] = self.strikes.get(sequence_number, 0) + 1
        return self.strikes[sequence_number]
