"""Packs computed before a trainer has room for them, so that the device does not wait for it to ask again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.ledger_desk import STREAM, LedgerDesk


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[LedgerDesk]:
    desk = LedgerDesk(tmp_path / "ledger.sqlite", num_slots=6, ahead=2)
    yield desk
    desk.close()


def test_two_packs_lie_ready_for_a_trainer_that_is_busy(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    assert desk.work() == [], "nobody has asked for anything"
    assert desk.get(name, incarnation) == [0]
    assert desk.computed == [0, 1, 2]
    # The next ones need not be waited for, and two more take their place.
    assert [desk.get(name, incarnation) for _ in range(2)] == [[1], [2]]
    assert desk.work() == [3, 4]


def test_what_a_run_waits_for_comes_before_what_another_will_want(desk: LedgerDesk) -> None:
    first, incarnation = desk.join("first")
    second, other = desk.join("second", next_step=50)
    desk.ask(first, incarnation)
    assert desk.work(1) == [0]
    desk.ask(second, other, packs=2)
    assert desk.work() == [50, 51, 1, 52, 2], "then in turns, as far as there is room"


def test_nothing_is_computed_early_into_a_slot_that_somebody_needs(tmp_path: Path) -> None:
    desk = LedgerDesk(tmp_path / "ledger.sqlite", num_slots=4, ahead=2)
    first, incarnation = desk.join("first")
    second, other = desk.join("second", next_step=50)
    desk.ask(first, incarnation, packs=2)
    desk.ask(second, other, packs=2)
    assert sorted(desk.work()) == [0, 1, 50, 51]
    assert desk.get(first, incarnation) == [0]
    assert desk.work() == [2], "pack 0's slot is free: the others are needed, each run's second one too"
    assert desk.control.counters(STREAM).packs_recomputed == 0
    desk.close()


def test_what_nobody_has_asked_for_makes_room_for_what_another_run_asks_for(tmp_path: Path) -> None:
    """A run that stands still must not keep the shelf of one that gets on, as many engines as there may be."""
    desk = LedgerDesk(tmp_path / "ledger.sqlite", num_slots=6, ahead=16)
    still, incarnation = desk.join("still")
    desk.ask(still, incarnation, packs=3)
    assert desk.work() == [0, 1, 2, 3, 4, 5], "alone, it has the whole shelf"
    fast, other = desk.join("fast", next_step=50)
    desk.ask(fast, other, packs=6)
    assert desk.work() == [50, 51, 52], "what the first has asked for stays"
    assert sorted(desk.slot_contents.values()) == [0, 1, 2, 50, 51, 52]
    assert desk.get(fast, other) == [50]
    assert desk.work() == [53]
    desk.close()


def test_ahead_of_its_trainer_a_run_takes_its_part_of_the_shelf_alone(tmp_path: Path) -> None:
    desk = LedgerDesk(tmp_path / "ledger.sqlite", num_slots=8, ahead=16)
    runs = [desk.join("first"), desk.join("second", next_step=50)]
    for name, incarnation in runs:
        desk.ask(name, incarnation)
    assert sorted(desk.work()) == [0, 1, 2, 3, 50, 51, 52, 53]
    assert desk.control.counters(STREAM).packs_recomputed == 0
    desk.close()


def test_a_paused_run_and_a_seek(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation)
    assert desk.work(1) == [0]
    desk.control.pause(name)
    assert desk.work() == []
    desk.control.resume(name)
    assert desk.work() == [1, 2]
    desk.seek(name, 30)
    assert desk.work() == [], "nothing was asked for at the new place yet"


@pytest.mark.parametrize("away", ["left", "silent"])
def test_nothing_is_computed_early_for_a_run_that_is_away(desk: LedgerDesk, away: str) -> None:
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation)
    assert desk.work(1) == [0]
    if away == "left":
        desk.ledger.leave(name, incarnation)
    else:
        desk.now += 31
    assert desk.work() == []


def test_nothing_is_computed_behind_the_end_of_a_run(desk: LedgerDesk) -> None:
    """`max_steps` and `max_tokens` end a run within an epoch: the server hears of it with every ask."""
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation, end=4)
    assert desk.work() == [0, 1, 2]
    for number in range(4):
        (lease,) = desk.ask(name, incarnation, end=4).leases
        assert desk.ledger.confirm(lease.token, lease.facts.generation) and lease.sequence_number == number
        desk.work()
    assert desk.computed == [0, 1, 2, 3]


def test_an_end_that_is_wrong_holds_nothing_back(desk: LedgerDesk) -> None:
    name, incarnation = desk.join("a")
    desk.ask(name, incarnation, packs=3, end=1)
    assert desk.work() == [0, 1, 2], "what is asked for is computed"
    desk.seek(name, 0)
    desk.ask(name, incarnation + 1, packs=2)
    assert desk.work() == [3], "and a later trainer that does not say where it ends gets its packs early"


def test_a_longer_run_of_the_stream_has_its_packs_early(desk: LedgerDesk) -> None:
    short, incarnation = desk.join("short")
    long, other = desk.join("long")
    desk.ask(short, incarnation, end=1)
    desk.ask(long, other)
    assert desk.work() == [0, 1, 2]


def test_the_end_of_an_epoch_is_the_end(tmp_path: Path) -> None:
    desk = LedgerDesk(tmp_path / "ledger.sqlite", num_packs=2, ahead=2)
    name, incarnation = desk.join("a")
    assert desk.get(name, incarnation) == [0]
    assert desk.work() == [] and desk.computed == [0, 1]
    desk.close()
