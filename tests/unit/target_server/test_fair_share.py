"""Who gets the target's time and the shelf's slots: far cursors, unequal packs, runs that are stuck or slow.

SLIPSTREAM_LEDGER_SEEDS=2000 looks at more of them than CI does.
"""

import os
import random
from collections import Counter

import pytest

from target_server import scheduling
from target_server.shelf import Shelf
from target_server.subscription import Lease
from tests.fakes.ledger_desk import FINGERPRINT, STREAM, LedgerDesk, terms

FAR = 1000
SEEDS = int(os.environ.get("SLIPSTREAM_LEDGER_SEEDS", "12"))
Run = tuple[str, int]


def take_all(desk: LedgerDesk, run: Run, packs: int = 4) -> list[int]:
    """What a trainer gets that reads at once and always has room."""
    leases = desk.ask(*run, packs=packs).leases
    return [lease.sequence_number for lease in leases if desk.ledger.confirm(lease.token, lease.facts.generation)]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_target_time_is_shared_by_runs_wherever_their_cursors_are(make_desk, seed: int) -> None:
    """Packs computed for runs that travel together are in proportion to their number; nobody starves."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 3) for _ in range(rng.randint(2, 4))]
    desk = make_desk(num_slots=24, num_packs=None)
    runs = [
        desk.join(f"r{place}-{number}", next_step=FAR * place + rng.randint(0, 2))
        for place, size in enumerate(sizes)
        for number in range(size)
    ]
    packs, received = 20 * sum(sizes), Counter[str]()
    for _ in range(packs):
        for run in rng.sample(runs, len(runs)):
            received[run[0]] += len(take_all(desk, run))
        assert len(desk.work(1)) == 1
    computed = Counter(number // FAR for number in desk.computed)
    for place, size in enumerate(sizes):
        assert abs(computed[place] - packs * size / sum(sizes)) <= 2 * sum(sizes), (sizes, computed)
    assert min(received.values()) >= 20 - 2 * len(runs)
    assert desk.shelf.packs_recomputed <= 3 * len(runs), "runs that travel together share every pack"


@pytest.mark.parametrize("cost", [4.0, 0.5])
def test_of_unequal_packs_each_run_gets_the_same_time(make_desk, cost: float) -> None:
    desk = make_desk(num_packs=None)
    other = "streams/other"
    desk.shelves.add(other, Shelf(4, 64, pack_cost=cost))
    plain = desk.join("plain")
    name = desk.ledger.open(terms("unequal", max_epochs=0), other, FINGERPRINT, None).name
    unequal = name, desk.seek(name, 0)
    for _ in range(200):
        take_all(desk, plain)
        take_all(desk, unequal)
        desk.work(1)
    spent, theirs = desk.shelf.packs_computed, cost * desk.book.shelves[other].packs_computed
    assert abs(spent - theirs) <= 2 * max(1.0, cost), (spent, theirs)


def test_credit_is_not_saved_up(make_desk) -> None:
    desk = make_desk(num_slots=8, num_packs=None)
    a, b = desk.join("a"), desk.join("b", next_step=FAR)
    desk.ask(*b)
    for _ in range(50):
        take_all(desk, a)
        desk.work(1)
    assert desk.computed.count(FAR) == 1, "b wanted one pack and no more"
    desk.computed.clear()
    for _ in range(10):
        take_all(desk, a)
        take_all(desk, b)
        desk.work(1)
    assert 4 <= sum(number >= FAR for number in desk.computed) <= 6


class Stuck:
    """A run that takes what it can get and gets on no more, but calls: it never counts as away."""

    def __init__(self, desk: LedgerDesk, run: Run, held: list[Lease]) -> None:
        self._desk, self._run, self.held = desk, run, held

    def call(self) -> None:
        tokens = [lease.token for lease in self.held]
        lost, _ = self._desk.ledger.renew(tokens, 60.0)
        assert lost == [], "its guaranteed leases stay"
        if len(self.held) < self._desk.book.limits.max_outstanding:
            self.held += self._desk.ask(*self._run, packs=8).leases


@pytest.mark.parametrize("seed", range(SEEDS))
def test_one_stuck_run_holds_nobody_up_for_long(make_desk, seed: int) -> None:
    """The shelf is full of packs that it needs or has leased; the others finish, and its own leases stay good."""
    rng = random.Random(seed)
    others = rng.randint(1, 3)
    desk = make_desk(num_slots=rng.randint(2 * (others + 1), 12), num_packs=40)
    stuck_run = desk.join("stuck", next_step=rng.randint(0, 3))
    runs = [desk.join(f"r{number}", next_step=rng.randint(0, 6)) for number in range(others)]
    stuck = Stuck(desk, stuck_run, [])
    if rng.random() < 0.5:
        desk.ask(*stuck_run, packs=8)
        desk.work()
    finished: set[str] = set()
    moved_at = desk.now
    while len(finished) < others:
        stuck.call()
        progress = 0
        for run in rng.sample(runs, others):
            progress += len(take_all(desk, run, packs=rng.randint(1, 6)))
            if desk.book.subscriptions[run[0]].exhausted:
                finished.add(run[0])
        progress += len(desk.work(rng.randint(1, 4)))
        moved_at = desk.now if progress else moved_at
        assert desk.now - moved_at <= desk.book.limits.patience + 1.0, "the others stand still"
        desk.pass_time(1.0)
    assert len(stuck.held) >= scheduling.guaranteed_slots(len(desk.shelf), others + 1)
    assert all(desk.ledger.confirm(lease.token, lease.facts.generation) for lease in stuck.held)


def test_a_run_waits_for_a_slower_one_no_longer_than_half_of_its_time(make_desk) -> None:
    """Then it goes ahead, and the slower one is served by computing again; both get on at their own pace."""
    desk = make_desk(num_slots=4, num_packs=None)
    fast, slow = desk.join("fast"), desk.join("slow")
    got = Counter[str]()
    for second in range(200):
        for _ in range(4):
            got["fast"] += len(take_all(desk, fast, packs=1))
            desk.work(1)
        if second % 4 == 0:
            while not take_all(desk, slow, packs=1):
                assert desk.work(1)
            got["slow"] += 1
        desk.pass_time(1.0)
    assert got["slow"] == 50
    assert got["fast"] > 300, "not the 54 that waiting would give"


def test_a_run_that_stumbled_and_caught_up_is_waited_for_again(make_desk) -> None:
    desk = make_desk(num_slots=4, num_packs=None)
    a, b = desk.join("a"), desk.join("b")
    while take_all(desk, a) or desk.work(1):
        pass
    assert not desk.book.subscriptions[b[0]].pace.left_behind
    desk.pass_time(desk.book.limits.patience)
    assert desk.get(*a) == [4], "b was left behind"
    assert desk.book.subscriptions[b[0]].pace.left_behind == 1
    while desk.book.subscriptions[b[0]].low < desk.book.subscriptions[a[0]].low:
        take_all(desk, b)
        desk.ask(*a)
        desk.work(1)
    desk.work()
    assert not desk.book.subscriptions[b[0]].pace.left_behind
    before = desk.shelf.packs_recomputed
    for _ in range(20):
        take_all(desk, a, 1)
        take_all(desk, b, 1)
        desk.work(1)
    assert desk.shelf.packs_recomputed == before


def test_runs_at_one_pace_are_never_parted(make_desk) -> None:
    """Their order changes all the time and each is held up now and then, but not for most of its time."""
    desk = make_desk(num_slots=4, num_packs=None)
    rng = random.Random(0)
    runs = [desk.join(run) for run in "abc"]
    for _ in range(300):
        for run in runs:
            if rng.random() < 0.5:
                take_all(desk, run, packs=1)
        desk.work(2)
        desk.pass_time(1.0)
    assert desk.shelf.packs_recomputed == 0
    assert desk.control.counters(STREAM).packs_computed > 100
