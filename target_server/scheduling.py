"""⑥ Which pack a convoy gets next, and which slot.

Subscriptions whose cursors lie within one shelf of each other travel as a *convoy*: a pack computed for one serves all,
and the ones ahead wait for the ones behind. Who holds others up for too long is left behind (see pace.py) and travels
apart, on slots of its own. Rules for a slot, first match wins:

    1. an empty slot;
    2. a pack that no active subscription needs within its window, the one unused for longest; of both kinds, a convoy
       that has its guaranteed slots leaves as many as the others lack of theirs;
    3. a pack that only this convoy needs, later than the one to be computed, the latest first;
    4. the latest pack that another convoy has beyond its own guaranteed ones, which are its earliest: for a convoy with
       fewer than its guaranteed slots before that pack, any; else one that nobody has asked for yet.

A pack that nobody has asked for yet is computed by rules 1 and 2 alone, where nothing else is wanted, and while its
convoy has less than its part of the shelf.
A pack under an unexpired lease, or being written, never gives way; how many leases there may be is held within the
guarantee as well. Rules 1 and 2 never cause a recomputation among active subscriptions; 3 and 4 do, after a seek
backwards and between convoys, and the shelf counts it.
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
    """Group the active subscriptions of one stream: neighbours at most `window` packs apart travel together, unless one
    was left behind."""
    groups: list[list[Subscription]] = []
    for subscription in sorted(active, key=lambda member: (member.pace.left_behind, member.low)):
        last = groups[-1][-1] if groups else None
        if last and last.pace.left_behind == subscription.pace.left_behind and subscription.low - last.low <= window:
            groups[-1].append(subscription)
        else:
            groups.append([subscription])
    return list(groups)


def next_missing(shelf: Shelf, convoy: Convoy, ahead: int = 0) -> int | None:
    """The first pack that a convoy wants, up to `ahead` packs early, and the shelf has not; None: there is none."""
    missing = (
        sequence_number
        for member in convoy
        if may_be_served(member)
        for sequence_number in member.wanted(len(shelf), ahead)
        if not shelf.holds(sequence_number)
    )
    return min(missing, default=None)


def choose(shelf: Shelf, convoy: Convoy, holdings: "Holdings") -> Choice | None:
    """The convoy's next pack and its slot; None when it wants nothing or no slot can be had now."""
    sequence_number = next_missing(shelf, convoy)
    if sequence_number is None:
        return None
    slot = _choose_slot(shelf, sequence_number, convoy, holdings)
    return None if slot is None else Choice(sequence_number, slot, convoy)


def choose_ahead(shelf: Shelf, convoy: Convoy, holdings: "Holdings", ahead: int) -> Choice | None:
    """A pack that a convoy will ask for soon and a slot that nobody misses; None when there is no such pair."""
    if len(holdings.of(convoy)) >= max(holdings.share, len(shelf) // (1 + len(holdings.of_others(convoy)))):
        return None
    sequence_number = next_missing(shelf, convoy, ahead)
    slot = None if sequence_number is None else _unneeded_slot(shelf, convoy, holdings)
    return None if slot is None or sequence_number is None else Choice(sequence_number, slot, convoy)


class Holdings:
    """Which slots hold what the convoys of a stream need; looked up once for all of them."""

    def __init__(self, shelf: Shelf, convoys: Sequence[Convoy]) -> None:
        self.share = guaranteed_slots(len(shelf), len(convoys))
        """Slots that each convoy is sure of."""
        self._convoys = convoys
        self._held = [_held(shelf, convoy) for convoy in convoys]

    def of(self, convoy: Convoy) -> list[Slot]:
        """Slots with packs that the convoy needs, ready or being written, in the order of the packs."""
        return next(held for other, held in zip(self._convoys, self._held, strict=True) if other is convoy)

    def of_others(self, convoy: Convoy) -> list[tuple[Convoy, list[Slot]]]:
        """The same, of all other convoys."""
        return [(other, held) for other, held in zip(self._convoys, self._held, strict=True) if other is not convoy]


def may_be_served(subscription: Subscription) -> bool:
    """A run is served once it has sought its cursor and its group is complete."""
    return subscription.record.started and subscription.record.incarnation > 0


def guaranteed_slots(num_slots: int, sharers: int) -> int:
    """Slots that each of so many subscriptions, or convoys, is sure of: two, or its part of a smaller shelf."""
    return max(1, min(GUARANTEED_SLOTS, num_slots // max(1, sharers)))


def may_pin(shelf: Shelf, slot: Slot, reader: Subscription, active: Sequence[Subscription]) -> bool:
    """Whether a lease on the slot leaves every other active subscription its guaranteed slots, to be leased in turn.

    A run that leases and does not get on must not take the whole shelf from the others until its leases run out.
    """
    share = guaranteed_slots(len(shelf), len(active))
    if slot.readers or len(reader.leased) < share:
        return True
    unpinned = sum(other.readers == 0 for other in shelf.slots) - 1
    return unpinned >= sum(max(0, share - len(other.leased)) for other in active if other is not reader)


def _choose_slot(shelf: Shelf, sequence_number: int, convoy: Convoy, holdings: Holdings) -> Slot | None:
    unneeded = _unneeded_slot(shelf, convoy, holdings)
    if unneeded is not None:
        return unneeded
    needed_here = {slot.index for slot in holdings.of(convoy)}
    later = [
        slot
        for slot in _free_of_others(shelf, convoy, holdings)
        if slot.index in needed_here and slot.sequence_number > sequence_number
    ]
    if later:
        return max(later, key=lambda slot: slot.sequence_number)
    return _steal(shelf, sequence_number, convoy, holdings)


def _unneeded_slot(shelf: Shelf, convoy: Convoy, holdings: Holdings) -> Slot | None:
    """Rules 1 and 2."""
    needed_here = {slot.index for slot in holdings.of(convoy)}
    empty = [slot for slot in shelf.slots if slot.state is SlotState.EMPTY]
    unneeded = [slot for slot in _free_of_others(shelf, convoy, holdings) if slot.index not in needed_here]
    if len(empty) + len(unneeded) <= _reserved(convoy, holdings):
        return None
    return empty[0] if empty else min(unneeded, key=lambda slot: slot.last_used)


def _free_of_others(shelf: Shelf, convoy: Convoy, holdings: Holdings) -> list[Slot]:
    """Slots whose packs nobody reads and no other convoy needs."""
    needed_by_others = {slot.index for _, held in holdings.of_others(convoy) for slot in held}
    return [slot for slot in shelf.ready_slots() if slot.readers == 0 and slot.index not in needed_by_others]


def _reserved(convoy: Convoy, holdings: Holdings) -> int:
    """Slots that a convoy with its guaranteed ones leaves to the others: they would only take them back."""
    if len(holdings.of(convoy)) < holdings.share:
        return 0
    return sum(max(0, holdings.share - len(held)) for _, held in holdings.of_others(convoy))


def _steal(shelf: Shelf, sequence_number: int, convoy: Convoy, holdings: Holdings) -> Slot | None:
    """Rule 4. Nobody loses a guaranteed pack, so no two convoys take slots from each other in turn.

    Windows of convoys overlap where one was left behind: a pack may be needed, and guaranteed, twice.
    """
    own = holdings.of(convoy)
    earlier = [slot for slot in own if slot.sequence_number < sequence_number]
    distances: dict[int, int] = {}
    guaranteed = {slot.index for slot in earlier}
    asked_for = {slot.index for slot in own}
    for other, held in holdings.of_others(convoy):
        guaranteed.update(slot.index for slot in held[: holdings.share])
        for slot in held:
            distances[slot.index] = max(distances.get(slot.index, 0), slot.sequence_number - other[0].low)
            if any(slot.sequence_number < member.asked_up_to for member in other):
                asked_for.add(slot.index)
    candidates = [slot for slot in shelf.ready_slots() if slot.readers == 0 and slot.index not in guaranteed]
    if len(earlier) >= holdings.share:
        candidates = [slot for slot in candidates if slot.index in distances and slot.index not in asked_for]
    return max(candidates, key=lambda slot: distances.get(slot.index, 0), default=None)


def _held(shelf: Shelf, convoy: Convoy) -> list[Slot]:
    """See Holdings."""
    held = (slot for slot in shelf.slots if slot.state is not SlotState.EMPTY and _needs(convoy, slot, len(shelf)))
    return sorted(held, key=lambda slot: slot.sequence_number)


def _needs(convoy: Convoy, slot: Slot, window: int) -> bool:
    """A member has not got the slot's pack yet, and the pack is near its cursor."""
    number = slot.sequence_number
    return any(member.low <= number < member.low + window and member.needs(number) for member in convoy)
