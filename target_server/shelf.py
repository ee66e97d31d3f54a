"""⑤ The shelf: which pack lies in which slot of a stream's arena, and how often packs had to be computed.

Bookkeeping only, without a lock and without bytes: the lease ledger owns it, the producer writes the bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

_BLOCK_PACKS = 4096
"""Packs that are remembered together; a cursor may be anywhere."""


class SlotState(Enum):
    """What a slot holds."""

    EMPTY = auto()
    WRITING = auto()
    READY = auto()


@dataclass(frozen=True, slots=True)
class PackFacts:
    """What the ledger and the manifest say about a finished pack."""

    num_tokens: int
    """Real tokens, padding not counted."""
    num_supervised_tokens: int
    generation: int
    """The arena's generation of the slot after the write."""


@dataclass(slots=True)
class Slot:
    """One place on the shelf."""

    index: int
    state: SlotState = SlotState.EMPTY
    sequence_number: int = -1
    """-1: none, or one that is not to be trusted and has readers still."""
    facts: PackFacts | None = None
    readers: int = 0
    """Unexpired leases on the present content; a slot with readers is never given to another pack."""
    last_used: int = 0
    """Tick of the last publication or confirmation: the slot unused for longest is given away first."""


class Shelf:
    """The slots of one stream: empty → writing → ready → writing (another pack) → …

    Packs stay memoised until their slot is needed.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pack_cost: float = 1.0) -> None:
        """`pack_cost`: how much of the target's time a pack takes, compared with those of other shelves."""
        assert num_slots > 0 and slot_bytes > 0 and pack_cost > 0, (num_slots, slot_bytes, pack_cost)
        self.slots = tuple(Slot(index) for index in range(num_slots))
        self.slot_bytes = slot_bytes
        self.pack_cost = pack_cost
        self.packs_computed = 0
        self.packs_recomputed = 0
        """Packs among packs_computed that had been computed before."""
        self.newest_sequence_number = 0
        """The pack computed, or being computed, most recently; 0 before the first."""
        self._by_sequence: dict[int, Slot] = {}
        self._seen: dict[int, bytearray] = {}  # a block of packs → a byte for each: 1 when it was computed before
        self._tick = 0

    def __len__(self) -> int:
        return len(self.slots)

    def remember(self, other: "Shelf") -> None:
        """Count on where the shelf ends whose place this one takes: what was computed for it is computed again."""
        self.packs_computed, self.packs_recomputed = other.packs_computed, other.packs_recomputed
        self.newest_sequence_number = other.newest_sequence_number
        self._seen = other._seen

    def ready(self, sequence_number: int) -> Slot | None:
        """The slot that holds the finished pack, if any does."""
        slot = self._by_sequence.get(sequence_number)
        return slot if slot is not None and slot.state is SlotState.READY else None

    def holds(self, sequence_number: int) -> bool:
        """True when the pack is here or being written."""
        return sequence_number in self._by_sequence

    def ready_slots(self) -> Iterator[Slot]:
        """All finished packs."""
        return (slot for slot in self.slots if slot.state is SlotState.READY)

    @property
    def is_writing(self) -> bool:
        """True while the producer fills a slot."""
        return any(slot.state is SlotState.WRITING for slot in self.slots)

    def reserve(self, slot: Slot, sequence_number: int) -> None:
        """Give a slot to a pack that will be written; what it held is gone."""
        assert slot.state is not SlotState.WRITING and slot.readers == 0, slot
        assert not self.holds(sequence_number), f"pack {sequence_number} is on the shelf already"
        self._forget(slot)
        slot.state = SlotState.WRITING
        slot.sequence_number = sequence_number
        self._by_sequence[sequence_number] = slot
        self.newest_sequence_number = sequence_number

    def publish(self, slot: Slot, facts: PackFacts) -> None:
        """The pack is complete: count it and offer it."""
        assert slot.state is SlotState.WRITING, slot
        slot.state = SlotState.READY
        slot.facts = facts
        self.touch(slot)
        self.packs_computed += 1
        if self._mark_seen(slot.sequence_number):
            self.packs_recomputed += 1

    def discard(self, slot: Slot) -> None:
        """Empty a slot: the pack was not finished, or is not to be trusted."""
        assert slot.readers == 0, slot
        self._forget(slot)

    def distrust(self, slot: Slot) -> None:
        """Offer the slot's pack to nobody any more: it can be computed into another slot. Its readers may finish."""
        del self._by_sequence[slot.sequence_number]
        slot.sequence_number = -1
        if slot.readers == 0:
            self._forget(slot)

    def touch(self, slot: Slot) -> None:
        """Note a use of the slot."""
        self._tick += 1
        slot.last_used = self._tick

    def _forget(self, slot: Slot) -> None:
        if slot.sequence_number >= 0:
            del self._by_sequence[slot.sequence_number]
        slot.state = SlotState.EMPTY
        slot.sequence_number = -1
        slot.facts = None

    def _mark_seen(self, sequence_number: int) -> bool:
        """Remember the pack; True when it was remembered already."""
        number, place = divmod(sequence_number, _BLOCK_PACKS)
        block = self._seen.setdefault(number, bytearray(_BLOCK_PACKS))
        seen = bool(block[place])
        block[place] = 1
        return seen
