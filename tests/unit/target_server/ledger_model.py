"""What one run must see of a lease ledger, in the plainest terms."""

from collections import Counter
from dataclasses import dataclass, field

from target_server.subscription import Lease

NUM_PACKS = 13
"""Of the stream."""
RUNS = {"a": 1, "b": 2, "c": 3}
"""Packs per step of each run."""
TIME_TO_LIVE = 20.0
"""Of every lease, in seconds."""
REJECTED = -1
"""In a slot whose pack is not offered any more, though somebody still reads it."""


@dataclass
class ModelRun:
    """What a run must see, in the plainest terms."""

    packs_per_step: int
    incarnation: int = 0
    cursor: int = 0
    """Next step that is not committed."""
    delivered: set[int] = field(default_factory=set)
    """In this incarnation, or before its cursor."""
    leases: dict[bytes, tuple[Lease, float]] = field(default_factory=dict)
    """Valid or expired, with the time at which each ends."""
    void: list[Lease] = field(default_factory=list)
    """Of older incarnations."""
    of_other_servers: list[Lease] = field(default_factory=list)
    """Granted by a server that was restarted since."""
    paused: bool = False
    quarantined: set[int] = field(default_factory=set)
    """Packs that it never gets."""
    strikes: Counter[int] = field(default_factory=Counter)
    """How often it has rejected a pack in this incarnation."""

    @property
    def limit(self) -> int:
        return NUM_PACKS // self.packs_per_step * self.packs_per_step

    def valid(self, now: float) -> dict[int, Lease]:
        return {
            lease.sequence_number: lease
            for lease, ends in self.leases.values()
            if ends > now and not self.is_done(lease.sequence_number)
        }

    def is_done(self, number: int) -> bool:
        """Whether it has the pack, or will never have it."""
        return number in self.delivered or number in self.quarantined

    @property
    def exhausted(self) -> bool:
        return all(self.is_done(number) for number in range(self.limit))

    @property
    def next_step_is_done(self) -> bool:
        first = self.cursor * self.packs_per_step
        return all(self.is_done(number) for number in range(first, first + self.packs_per_step))

    def undelivered(self, now: float) -> list[int]:
        """Packs that may be leased now, in order."""
        leased = self.valid(now)
        return [number for number in range(self.limit) if not self.is_done(number) and number not in leased]
