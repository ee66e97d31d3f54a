"""⑥ Which pack is computed next, and which slot it gets.

Subscriptions whose cursors lie within one shelf of each other travel as a *convoy*: a pack computed for one serves all,
and the ones ahead wait for the ones behind. Convoys take turns. Rules for a slot, first match wins:

    1. an empty slot;
    2. a pack that no active subscription needs within its window, the one unused for longest;
    3. a pack of the same convoy that is needed later than the one to be computed, the latest first;
    4. for a convoy that has fewer than its guaranteed slots: the latest pack of a convoy that has more.

A pack under an unexpired lease, or being written, never gives way. Rules 1 and 2 never cause a recomputation among
active subscriptions; 3 and 4 do, after a seek backwards and between convoys, and the shelf counts it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from target_server.shelf import Shelf, Slot, SlotState
from target_server.subscription import Subscription

GUARANTEED_SLOTS = 2
"""One to read from while the next is computed."""

Convoy = Sequence[Subscription]


@dataclass(frozen=True, slots=True)
class Choice:
    """A pack to compute and the slot it may have."""

    sequence_number: int
    slot: Slot
    convoy: Convoy


def convoys(active: Iterable[Subscription], window: int) -> list[Convoy]:
    """Group the active subscriptions of one stream: neighbours at most `window` packs apart travel together."""
    groups: list[list[Subscription]] = []
    for subscription in sorted(active, key=lambda member: member.low):
        if groups and subscription.low - groups[-1][-1].low <= window:
            groups[-1].append(subscription)
        else:
            groups.append([subscription])
    return list(groups)


def choose(shelf: Shelf, convoy: Convoy, all_convoys: Sequence[Convoy]) -> Choice | None:
    """The convoy's next pack and its slot; None when it wants nothing or no slot can be had now."""
    window = len(shelf)
    missing = (
        sequence_number
        for member in convoy
        if may_be_served(member)
        for sequence_number in member.wanted(window)
        if not shelf.holds(sequence_number)
    )
    sequence_number = min(missing, default=None)
    if sequence_number is None:
        return None
    slot = _choose_slot(shelf, sequence_number, convoy, all_convoys)
    return None if slot is None else Choice(sequence_number, slot, convoy)


def may_be_served(subscription: Subscription) -> bool:
    """A run is served once it has sought its cursor and its group is complete."""
    return subscription.record.started and subscription.record.incarnation > 0


def _choose_slot(shelf: Shelf, sequence_number: int, convoy: Convoy, all_convoys: Sequence[Convoy]) -> Slot | None:
    window = len(shelf)
    empty = next((slot for slot in shelf.slots if slot.state is SlotState.EMPTY), None)
    if empty is not None:
        return empty
    free = [slot for slot in shelf.ready_slots() if slot.readers == 0]
    unneeded = [slot for slot in free if not any(_needs(other, slot, window) for other in all_convoys)]
    if unneeded:
        return min(unneeded, key=lambda slot: slot.last_used)
    later = [slot for slot in free if _needs(convoy, slot, window) and slot.sequence_number > sequence_number]
    if later:
        return max(later, key=lambda slot: slot.sequence_number)
    return _steal(shelf, free, convoy, all_convoys)


def _steal(shelf: Shelf, free: Sequence[Slot], convoy: Convoy, all_convoys: Sequence[Convoy]) -> Slot | None:
    """Rule 4. Windows of different convoys do not overlap, so a pack is needed by one convoy only."""
    window = len(shelf)
    share = max(1, min(GUARANTEED_SLOTS, len(shelf) // len(all_convoys)))
    if _held(shelf, convoy) >= share:
        return None
    rich = [other for other in all_convoys if other is not convoy and _held(shelf, other) > share]
    candidates = [
        (slot.sequence_number - other[0].low, slot) for other in rich for slot in free if _needs(other, slot, window)
    ]
    return max(candidates, key=lambda pair: pair[0])[1] if candidates else None


def _held(shelf: Shelf, convoy: Convoy) -> int:
    return sum(slot.state is not SlotState.EMPTY and _needs(convoy, slot, len(shelf)) for slot in shelf.slots)


def _needs(convoy: Convoy, slot: Slot, window: int) -> bool:
    """A member has not got the slot's pack yet, and the pack is near its cursor."""
    number = slot.sequence_number
    return any(member.low <= number < member.low + window and member.needs(number) for member in convoy)
