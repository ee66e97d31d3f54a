"""Engines as processes, without models: who computes what, what a dead engine leaves, and when the server gives up."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_files import TargetFiles
from slipstream.target_fingerprint import fingerprint_target
from target_server import engine_keeper
from target_server.engine_plan import EnginePlan
from target_server.engine_pool import DEATHS_ALLOWED, EnginePool, EngineTerms
from target_server.lease_book import LeaseBook
from target_server.lease_ledger import Ask, LeaseLedger, SeekTo
from target_server.ledger_store import LedgerStore
from target_server.stream_shelves import StreamShelves
from target_server.streams import StreamCatalog
from target_server.subscription import SubscriptionTerms
from target_server.target_model import TargetModel
from target_server.work_queue import WorkQueue
from tests.fakes.served_model import data_spec_json

PATIENCE = 60.0

Found = TypeVar("Found")


class House:
    """A ledger, a work queue, streams in shared memory, and engines that obey the files in `orders`."""

    def __init__(self, target: TargetModel, conversations: Path, directory: Path, ranks: tuple[int, ...]) -> None:
        self.orders = directory / "orders"
        self.orders.mkdir()
        facts = (target.config.canonical_json(), target.model_id, None, "float32", 4096, True)
        names = ("config", "model_id", "revision", "dtype", "max_document_tokens", "computes_any_length")
        (self.orders / "facts.json").write_text(json.dumps(dict(zip(names, facts, strict=True))))
        self.store = LedgerStore(directory / "ledger.sqlite")
        book = LeaseBook(self.store)
        self.ledger, self.queue = LeaseLedger(book), WorkQueue(book)
        self.living: list[int] = []
        plan = EnginePlan(
            tuple(("cpu",) * count for count in ranks), program=(sys.executable, "-m", "tests.fakes.scripted_engine")
        )
        files = TargetFiles(self.orders, (self.orders / "facts.json",), (), None)
        spec = TargetSpec(model=str(self.orders))
        terms = EngineTerms(spec, files, fingerprint_target(files, spec.dtype), directory, None)
        self.pool = EnginePool(plan, terms, self.living.append)
        self.catalog = StreamCatalog(
            target, StreamShelves(book), shelf_bytes=2**21, shm_dir=directory, data_roots=None, on_drop=self.pool.forget
        )
        self._data = data_spec_json(conversations)

    def open(self) -> None:
        """Start the engines, and a run that wants packs."""
        self.pool.start()
        self.pool.wait_ready()
        self.pool.serve(self.queue, self.catalog)
        terms = SubscriptionTerms("a", self._data, (0, 2), False, 1, max_epochs=0)
        stream = self.catalog.open(terms)
        self.stream = stream.name
        record = self.ledger.open(terms, stream.name, "f" * 64, stream.end(0))
        self.name = record.name
        self.incarnation = self.ledger.seek(record.name, SeekTo(0, 0, record.incarnation))
        self._next_step = 0

    def take(self, count: int, *, at_least_aside: int = 0) -> tuple[list[int], list[int]]:
        """Read and commit so many packs, or what comes until the server ends; those that came, and those set aside."""
        came: list[int] = []
        aside: list[int] = []
        deadline = time.monotonic() + PATIENCE
        while not self.pool.closed.is_set() and (len(came) + len(aside) < count or len(aside) < at_least_aside):
            assert time.monotonic() < deadline, (came, aside)
            left = max(1, count - len(came) - len(aside))
            grant = self.ledger.lease(self.name, Ask(self.incarnation, left, max_wait=1.0))
            aside += [number for number in grant.quarantined if number not in aside]
            for lease in grant.leases:
                assert self.ledger.confirm(lease.token, lease.facts.generation)
                came.append(lease.sequence_number)
            while self._next_step in (*came, *aside):
                self.ledger.commit(self.name, self.incarnation, self._next_step)
                self._next_step += 1
        return came, aside

    def take_meanwhile(self, count: int) -> Callable[[], tuple[list[int], list[int]]]:
        """The same in a thread; returns what waits for its end."""
        taken: list[tuple[list[int], list[int]]] = []
        thread = threading.Thread(target=lambda: taken.append(self.take(count)), daemon=True)
        thread.start()

        def result() -> tuple[list[int], list[int]]:
            thread.join(PATIENCE)
            assert taken, "the packs did not come"
            return taken[0]

        return result

    def order(self, *names: str) -> None:
        """As tests.fakes.scripted_engine."""
        for name in names:
            (self.orders / name).touch()

    def held(self, number: int) -> set[int]:
        """The processes that have stopped before this pack."""
        return {int(path.suffix[1:]) for path in self.orders.glob(f"at-{number}.*")}

    def close(self) -> None:
        self.queue.close()
        self.pool.close()
        self.catalog.close()
        self.store.close()


def wait_for(look: Callable[[], Found | None]) -> Found:
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


HouseMaker = Callable[..., House]


@pytest.fixture
def make_house(
    target: TargetModel,
    conversations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[HouseMaker]:
    monkeypatch.setattr(engine_keeper, "_FIRST_PAUSE", 0.01)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    houses: list[House] = []

    def make(*ranks: int) -> House:
        houses.append(House(target, conversations, tmp_path, ranks))
        return houses[-1]

    with caplog.at_level("INFO"):
        yield make
        for house in houses:
            house.close()
        assert not any(is_alive(pid) for pids in started(caplog) for pid in pids), "an engine has outlived its server"


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    return [record.slipstream_fields for record in caplog.records if record.message == name]  # type: ignore[attr-defined]


def started(caplog: pytest.LogCaptureFixture) -> list[list[int]]:
    """The processes of every engine that was started, in order."""
    return [event["pids"] for event in events(caplog, "engine_started")]


def test_engines_work_side_by_side(make_house: HouseMaker) -> None:
    house = make_house(1, 1)
    # An engine has two packs at most, so the third is another's.
    house.order("hold-0", "hold-1", "hold-2")
    house.open()
    taken = house.take_meanwhile(6)
    wait_for(lambda: len(house.held(0) | house.held(1) | house.held(2)) == 2)
    for number in range(3):
        (house.orders / f"hold-{number}").unlink()
    assert taken() == ([0, 1, 2, 3, 4, 5], [])


def test_what_a_killed_engine_had_is_computed_again_and_never_suspected(
    make_house: HouseMaker, caplog: pytest.LogCaptureFixture
) -> None:
    house = make_house(1)
    house.order("hold-1")
    house.open()
    taken = house.take_meanwhile(4)
    for kills in range(1, 4):
        held = wait_for(lambda kills=kills: house.held(1) if len(house.held(1)) == kills else None)
        (newest,) = held & set(started(caplog)[-1])
        os.kill(newest, signal.SIGKILL)
    (house.orders / "hold-1").unlink()
    assert taken() == ([0, 1, 2, 3], [])
    assert house.living[:5] == [1, 0, 1, 0, 1]
    for event in events(caplog, "engine_died"):
        assert "SIGKILL" in event["why"] and 1 in event["packs_lost"]


def test_an_engine_that_says_nothing_is_named_in_the_log(
    make_house: HouseMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_keeper, "SILENT_SECONDS", 0.05)
    house = make_house(1)
    house.order("hold-1")
    house.open()
    taken = house.take_meanwhile(4)
    (held,) = wait_for(lambda: house.held(1))
    silent = wait_for(lambda: [event for event in events(caplog, "engine_silent") if 1 in event["packs"]])[0]
    assert silent["pids"] == [held] and "kill its processes" in silent["remedy"]
    os.kill(held, signal.SIGKILL)
    (house.orders / "hold-1").unlink()
    assert taken() == ([0, 1, 2, 3], [])


def test_a_pack_that_crashes_its_engine_twice_is_set_aside_with_its_documents(
    make_house: HouseMaker, caplog: pytest.LogCaptureFixture
) -> None:
    house = make_house(1, 1)
    house.order("crash-2", "nan-4")
    house.open()
    came, aside = house.take(7, at_least_aside=2)
    assert sorted(aside) == [2, 4]
    assert sorted([*came, *aside]) == list(range(len(came) + 2)), "those that were in flight beside it came"
    poison, not_finite = sorted(events(caplog, "pack_quarantined"), key=lambda event: event["sequence_number"])
    names = house.catalog.get(house.stream).sequence.pack(2).document_names
    assert (poison["documents"], poison["sequence_number"]) == (names, 2)
    assert "crashed its engine twice" in poison["why"] and "pack 2 is poison" in poison["why"]
    assert not_finite["why"] == "hidden states are not finite"
    assert len(events(caplog, "engine_died")) == 2


def test_one_rank_takes_the_others_with_it(make_house: HouseMaker, caplog: pytest.LogCaptureFixture) -> None:
    house = make_house(2)
    house.order("hold-1")
    house.open()
    taken = house.take_meanwhile(3)
    wait_for(lambda: len(house.held(1)) == 2)
    ((first, second),) = started(caplog)
    os.kill(second, signal.SIGKILL)
    wait_for(lambda: len(started(caplog)) == 2)
    assert not is_alive(first)
    (house.orders / "hold-1").unlink()
    assert taken() == ([0, 1, 2], [])
    assert "engine-0.1 was ended by SIGKILL" in events(caplog, "engine_died")[0]["why"]


def test_engines_that_only_die_end_the_server_with_their_last_words(make_house: HouseMaker) -> None:
    house = make_house(1, 1)
    house.order("crash-start")
    house.pool.start()
    words = f"died {DEATHS_ALLOWED} times in a row .* engine-. ended with status 3; it said last: engine-. cannot find"
    with pytest.raises(SlipstreamError, match=words) as caught:
        house.pool.wait_ready()
    assert caught.value.reason is Reason.INTERNAL


def test_a_refusal_at_the_start_ends_the_server_at_once(make_house: HouseMaker) -> None:
    house = make_house(1, 1)
    house.order("refuse-start")
    house.pool.start()
    with pytest.raises(SlipstreamError, match="engine-.: the target is too large.") as caught:
        house.pool.wait_ready()
    assert (caught.value.reason, caught.value.remedy) == (Reason.OUT_OF_MEMORY, "Take a smaller one.")


def test_want_of_memory_is_no_packs_fault(make_house: HouseMaker, caplog: pytest.LogCaptureFixture) -> None:
    house = make_house(1)
    house.order("refuse-1")
    house.open()
    taken = house.take_meanwhile(3)
    with pytest.raises(SlipstreamError, match="engine-0: no memory for pack 1") as caught:
        house.pool.run()
    assert caught.value.reason is Reason.OUT_OF_MEMORY
    assert taken()[1] == [], "no pack was set aside"
    assert len(events(caplog, "engine_died")) == DEATHS_ALLOWED


@pytest.mark.parametrize("change", ["touched", "written"])
def test_an_engine_is_started_again_on_the_same_files_only(
    make_house: HouseMaker, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    house = make_house(1)
    house.open()
    assert house.take(2) == ([0, 1], [])
    facts = house.orders / "facts.json"
    facts.write_text(facts.read_text() + (" " if change == "written" else ""))
    os.utime(facts, ns=(1, 1))
    ((pid,),) = started(caplog)
    os.kill(pid, signal.SIGKILL)
    if change == "touched":
        assert house.take(4)[0] == [2, 3, 4, 5]
        return
    with pytest.raises(SlipstreamError, match="files of .* have changed since this server was started") as caught:
        house.pool.run()
    assert caught.value.reason is Reason.MODEL_INVALID


def test_memory_of_a_stream_is_given_back_before_the_server_uses_it_again(make_house: HouseMaker) -> None:
    house = make_house(1, 1)
    house.open()
    house.take(2)
    house.pool.forget(house.catalog.get(house.stream).arena)  # answered by all, or it would time out
