"""Records on a disk: what is read is what was written, the budget always holds, and nothing damaged is served."""

import errno
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server import state_cache_segment
from target_server.state_cache_directory import FORMAT_FILE
from target_server.state_cache_store import MIN_BYTES, StateStore

KIB = 2**10
BUDGET = MIN_BYTES
RECORD = BUDGET // 128

StoreMaker = Callable[..., StateStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[StoreMaker]:
    opened: list[StateStore] = []

    def open_it(budget_bytes: int = BUDGET, directory: Path = tmp_path / "cache") -> StateStore:
        opened.append(StateStore(directory, budget_bytes))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(number: int, size: int = RECORD) -> bytes:
    return random.Random(number).randbytes(size)


def put(store: StateStore, number: int, size: int = RECORD) -> bool:
    """As the cache does: look first, write what is not there."""
    with store.reading({key_of(number): size}) as places:
        if places:
            return False
    return store.put(key_of(number), np.frombuffer(content(number, size), np.uint8))


def get(store: StateStore, number: int, size: int = RECORD) -> bytes | None:
    buffer = np.zeros(size, np.uint8)
    with store.reading({key_of(number): size}) as places:
        for key, place in places.items():
            if store.read(key, place, buffer):
                return buffer.tobytes()
    return None


def on_disk(store: StateStore) -> int:
    return sum(path.stat().st_size for path in store.directory.iterdir())


def segments(store: StateStore) -> list[Path]:
    return sorted(store.directory.glob("*.states"))


def test_what_is_read_is_what_was_written_also_by_the_next_process(open_store: StoreMaker) -> None:
    sizes = {number: 1 + 700 * number for number in range(20)}
    store = open_store()
    assert all(put(store, number, size) for number, size in sizes.items())
    assert not put(store, 3, sizes[3]), "it is there already"
    for _ in range(2):
        assert {number: get(store, number, size) for number, size in sizes.items()} == {
            number: content(number, size) for number, size in sizes.items()
        }
        assert get(store, 99) is None
        store.close()
        store = open_store()
    assert len(store) == len(sizes)
    assert put(store, 20), "and it goes on"
    assert get(store, 20) == content(20)
    assert len(segments(store)) > 1


def test_a_record_of_another_size_is_not_the_one_asked_for(open_store: StoreMaker) -> None:
    store = open_store()
    put(store, 1)
    assert get(store, 1, RECORD - 1) is None
    assert store.numbers.corrupt == 0


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 90)), max_size=200),
    budget=st.integers(MIN_BYTES, 2 * MIN_BYTES),
)
def test_the_budget_is_never_exceeded(
    steps: list[tuple[bool, int, int]], budget: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = StateStore(tmp_path_factory.mktemp("cache"), budget)
    sizes: dict[int, int] = {}
    for reopen, number, kib in steps:
        if reopen and number < 4:
            store.close()
            store = StateStore(store.directory, budget)
        size = sizes.setdefault(number, kib * KIB)
        put(store, number, size)
        got = get(store, number, size)
        assert got in (None, content(number, size))
        assert on_disk(store) <= store.used_bytes <= budget
    store.close()


def test_hundreds_of_records_go_through_a_small_budget(open_store: StoreMaker) -> None:
    store = open_store()
    rng = random.Random(0)
    kept = 0
    for number in range(600):
        kept += put(store, number, size := rng.randrange(1, 24 * KIB))
        assert on_disk(store) <= store.used_bytes <= BUDGET
        if kept and rng.random() < 0.2:
            assert get(store, number, size) in (None, content(number, size))
    assert store.numbers.evictions > 50
    assert len(store) > 40
    assert len(segments(store)) <= 66


def test_what_was_used_least_recently_goes_first(open_store: StoreMaker) -> None:
    store = open_store()
    numbers = range(100)
    for number in numbers:
        put(store, number)
    store.close()
    store = open_store()
    used = [number for number in numbers if number % 4 == 0]
    for number in used:
        assert get(store, number) == content(number)
    for number in range(1000, 1040):
        put(store, number)
        for kept in used:
            assert key_of(kept) in store, "used since the start"
    assert store.numbers.evictions > 0


def test_what_is_in_use_all_the_time_does_not_give_way(open_store: StoreMaker) -> None:
    """A run whose data is larger than the budget reads what fits and does not write the disk anew in every epoch."""
    store = open_store()
    rng = random.Random(0)
    numbers = list(range(6500))
    hits = []
    for _ in range(3):
        rng.shuffle(numbers)
        hits.append(0)
        for number in numbers:
            if get(store, number, KIB // 4) is None:
                put(store, number, KIB // 4)
            else:
                hits[-1] += 1
    fits = len(store) / len(numbers)
    assert 0.4 < fits < 0.6
    assert hits[0] == 0
    assert hits[2] > 0.9 * fits * len(numbers)
    assert store.numbers.bytes_written < 1.5 * len(numbers) * KIB // 4


def test_what_is_read_is_not_removed(open_store: StoreMaker) -> None:
    store = open_store()
    for number in range(100):
        put(store, number)
    store.close()
    store = open_store()
    buffer = np.zeros(RECORD, np.uint8)
    with store.reading({key_of(0): RECORD}) as places:
        path = places[key_of(0)].segment.path
        for number in range(1000, 1400):
            put(store, number)
        assert store.numbers.evictions > 50
        assert path.exists()
        assert on_disk(store) <= store.used_bytes <= BUDGET
        assert store.read(key_of(0), places[key_of(0)], buffer)
        assert buffer.tobytes() == content(0)
    for number in range(2000, 2400):
        put(store, number)
    assert not path.exists()
    assert get(store, 0) is None


def test_while_everything_is_read_nothing_is_written(open_store: StoreMaker) -> None:
    store = open_store()
    for number in range(200):
        put(store, number)
    store.close()
    store = open_store()
    there = [number for number in range(200) if key_of(number) in store]
    with store.reading({key_of(number): RECORD for number in there}):
        kept = [put(store, number) for number in range(1000, 1020)]
        assert all(key_of(number) in store for number in there)
        assert store.numbers.refused == kept.count(False) > 10
    assert put(store, 2000)


def test_a_record_larger_than_the_budget_costs_nothing(open_store: StoreMaker) -> None:
    store = open_store()
    put(store, 0)
    assert not put(store, 1, BUDGET)
    assert get(store, 0) == content(0)


def test_a_smaller_budget_takes_effect_at_the_start(open_store: StoreMaker) -> None:
    store = open_store(4 * BUDGET)
    for number in range(400):
        put(store, number)
    newest = [number for number in range(400) if key_of(number) in store][-1]
    store.close()
    store = open_store()
    assert on_disk(store) <= store.used_bytes <= BUDGET
    assert get(store, newest) == content(newest)


def test_no_flipped_bit_is_served(open_store: StoreMaker) -> None:
    store = open_store()
    for number in range(24):
        put(store, number)
    store.close()
    rng = random.Random(1)
    for round_number in range(12):
        store = open_store()
        path = rng.choice([*store.directory.glob("*.states"), *store.directory.glob("*.index")])
        store.close()
        raw = bytearray(path.read_bytes())
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        store = open_store()
        got = [get(store, number) for number in range(24)]
        assert all(each in (None, content(number)) for number, each in enumerate(got)), round_number
        store.close()
    assert 0 < got.count(None) <= 12


def test_a_damaged_record_is_dropped_counted_and_can_be_written_again(
    open_store: StoreMaker, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    put(store, 0)
    (path,) = segments(store)
    path.write_bytes(bytes(RECORD))
    assert get(store, 0) is None
    assert store.numbers.corrupt == 1
    assert "state_cache_corrupt" in caplog.text
    assert put(store, 0)
    assert get(store, 0) == content(0)
    store.close()
    assert get(open_store(), 0) == content(0), "the newer of two records counts"


@pytest.mark.parametrize("suffix", [".states", ".index"])
@pytest.mark.parametrize("open_already", [True, False])
def test_what_was_cut_off_is_not_served(open_store: StoreMaker, suffix: str, open_already: bool) -> None:
    store = open_store(64 * BUDGET)
    for number in range(8):
        put(store, number)
    path = segments(store)[0].with_suffix(suffix)
    if not open_already:
        store.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size // 2 + 7)
    if not open_already:
        store = open_store(64 * BUDGET)
    got = [get(store, number) for number in range(8)]
    assert all(each in (None, content(number)) for number, each in enumerate(got))
    whole = 8 if open_already and suffix == ".index" else 4
    assert 8 - got.count(None) == whole
    for number in range(8, 12):
        put(store, number)
    assert [get(store, number) for number in range(8, 12)] == [content(number) for number in range(8, 12)]


def test_a_full_disk_leaves_what_was_there(open_store: StoreMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    put(store, 0)
    write_all = state_cache_segment.write_all

    def half(fd: int, data: memoryview, offset: int) -> None:
        write_all(fd, data[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(state_cache_segment, "write_all", half)
        with pytest.raises(OSError, match="No space"):
            put(store, 1)
    assert [get(store, number) for number in (0, 1)] == [content(0), None]
    assert on_disk(store) <= store.used_bytes
    assert put(store, 1)
    store.close()
    store = open_store()
    assert [get(store, number) for number in (0, 1)] == [content(0), content(1)]


def refused(call: Callable[[], object], words: str, reason: Reason = Reason.ENVIRONMENT_UNSUPPORTED) -> None:
    with pytest.raises(SlipstreamError, match=words) as caught:
        call()
    assert caught.value.reason is reason
    assert "--state-cache" in caught.value.remedy


def test_what_is_refused_at_the_start(open_store: StoreMaker, tmp_path: Path) -> None:
    store = open_store()
    refused(open_store, "in use by another target server")
    store.close()
    store = open_store()  # after the other has gone
    store.close()

    path = store.directory / FORMAT_FILE
    path.write_text(json.dumps({"format": "slipstream.state-cache.v9"}))
    refused(open_store, "format slipstream.state-cache.v9")
    path.write_text("{")
    refused(open_store, "cannot be read")

    refused(lambda: open_store(directory=tmp_path), "holds other files")
    (tmp_path / "file").touch()
    refused(lambda: open_store(directory=tmp_path / "file"), "could not be written", Reason.PATH_NOT_ALLOWED)
    refused(lambda: open_store(budget_bytes=BUDGET - 1, directory=tmp_path / "new"), "not even one pack")


def test_what_is_left_of_a_start_that_was_killed_is_no_obstacle(open_store: StoreMaker, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    (directory / "lock").touch()
    (directory / f".{FORMAT_FILE}.123").write_text("{")
    store = open_store()
    assert put(store, 0)
    store.close()
    (directory / "00000001.index").unlink()  # a segment that was being removed
    store = open_store()
    assert len(store) == 0
    assert not segments(store)
