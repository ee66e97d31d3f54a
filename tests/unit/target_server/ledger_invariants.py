"""What must hold of a lease ledger at any moment, whatever was done to it before."""

from collections import Counter

from target_server import scheduling
from target_server.shelf import Slot, SlotState
from tests.fakes.ledger_desk import STREAM, LedgerDesk
from tests.unit.target_server.ledger_model import REJECTED, ModelRun


def leased_slots_keep_their_pack(desk: LedgerDesk, model: ModelRun) -> None:
    """What a run holds a lease on is neither rewritten nor given away."""
    for number, lease in model.valid(desk.now).items():
        assert desk.slot_contents[lease.slot.index] == number
        assert lease.slot.state is SlotState.READY and lease.slot.sequence_number in (number, REJECTED)


def nothing_is_leaked(desk: LedgerDesk) -> None:
    """Every reader of a slot is a lease, every lease is a run's, and no slot is being written by nobody."""
    book = desk.book
    of_runs = [lease for subscription in book.subscriptions.values() for lease in subscription.leased.values()]
    assert sorted(lease.token for lease in of_runs) == sorted(book.leases)
    readers = Counter(lease.slot.index for lease in of_runs)
    assert all(slot.readers == readers[slot.index] for slot in desk.shelf.slots)
    assert not desk.shelf.is_writing


def the_shelf_keeps_its_bound(desk: LedgerDesk) -> None:
    """In bytes: neither what is ready nor what is being written is ever more than the arena has room for."""
    num_slots = len(desk.shelf)
    occupied = _occupied(desk)
    held = [slot.sequence_number for slot in occupied if slot.sequence_number != REJECTED]
    assert len(held) == len(set(held)) and len(occupied) <= num_slots
    counters = desk.control.counters(STREAM)
    assert counters.shelf_size_bytes <= counters.shelf_capacity_bytes == num_slots * desk.shelf.slot_bytes


def who_waits_has_its_slots(desk: LedgerDesk) -> None:
    """Once an engine finds nothing to do: whoever still wants a pack has its guaranteed slots, or readers do."""
    num_slots = len(desk.shelf)
    convoys = scheduling.convoys(desk.book.active(STREAM), num_slots)
    share = scheduling.guaranteed_slots(num_slots, len(convoys))
    read = sum(slot.readers > 0 for slot in desk.shelf.slots)
    for convoy in convoys if len(convoys) <= num_slots else ():
        served = [member for member in convoy if scheduling.may_be_served(member)]
        wanted = {number for member in served for number in member.wanted(num_slots)}
        if all(desk.shelf.holds(number) for number in wanted):
            continue
        near = [slot for slot in _occupied(desk) if _is_needed_near(convoy, slot, num_slots)]
        assert len(near) + read >= share, f"{convoy[0].record.name} has {len(near)} of its {share} slots"


def _occupied(desk: LedgerDesk) -> list[Slot]:
    return [slot for slot in desk.shelf.slots if slot.state is not SlotState.EMPTY]


def _is_needed_near(convoy: scheduling.Convoy, slot: Slot, num_slots: int) -> bool:
    number = slot.sequence_number
    return any(member.low <= number < member.low + num_slots and member.needs(number) for member in convoy)
