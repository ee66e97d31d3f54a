"""A pack's states out of a slot to the disk, and back into another."""

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.arena import PayloadArena
from slipstream.wire.codec import DTYPES, ByteArray, LayoutEntry, PayloadLayout, plan_layout, write_tensor
from target_server import state_cache_segment
from target_server.cli import parse_size, read_state_cache
from target_server.packing import Pack
from target_server.producer import PackSource, tensors_of
from target_server.state_cache import CachedTarget, StateCache
from target_server.state_cache_part import part_of
from target_server.state_cache_store import MIN_BYTES, StateStore
from target_server.state_cache_writer import PACKS_WAITING

BUDGET = 64 * 2**20
PACK_TOKENS = 64
WIDTH = 8
TARGET = CachedTarget("target-a", num_layers=4, hidden_size=WIDTH, itemsize=4, computes_documents=True)


@dataclass(frozen=True)
class SlotStream:
    """A stream's slots alone."""

    name: str
    layer_ids: tuple[int, ...]
    last_hidden_state: bool
    arena: PayloadArena
    layout: PayloadLayout
    pack_tokens: int = PACK_TOKENS

    @property
    def sequence(self) -> PackSource:
        raise AssertionError("packs are given")


def slot_stream(
    layers: tuple[int, ...], *, last: bool = False, dtype: torch.dtype = torch.float32, slots: int = 2
) -> SlotStream:
    rows = [("input_ids", torch.int32), ("loss_mask", torch.uint8)]
    entries: list[LayoutEntry] = [
        (name, kind, (PACK_TOKENS,))
        for name, kind in (*rows, ("document_ids", torch.int32), ("position_ids", torch.int32))
    ]
    names = [f"hidden_states.{layer}" for layer in layers] + (["last_hidden_state"] if last else [])
    layout = plan_layout(entries + [(name, dtype, (PACK_TOKENS, WIDTH)) for name in names])
    arena = PayloadArena.create(slots, layout.size_bytes, directory=None)
    return SlotStream(f"streams/{layers}", layers, last, arena, layout)


def make_pack(documents: Sequence[Sequence[int]]) -> Pack:
    lengths = tuple(map(len, documents))
    used = sum(lengths)
    rest = PACK_TOKENS - used
    return Pack(
        sequence_number=0,
        token_ids=np.array([*chain(*documents), *[0] * rest], np.int32),
        loss_mask=np.array([1] * used + [0] * rest, np.uint8),
        document_ids=np.array([*np.repeat(range(len(lengths)), lengths), *[-1] * rest], np.int32),
        position_ids=np.array([*(i for n in lengths for i in range(n)), *[0] * rest], np.int32),
        document_lengths=lengths,
        document_names=tuple(map(str, documents)),
        num_tokens=used,
        num_supervised=used,
    )


def compute(stream: SlotStream, slot_index: int, pack: Pack, salt: int = 0) -> ByteArray:
    """States that are a function of layer and tokens, bit for bit, as if the target had computed them; a copy."""
    slot = stream.arena.slot(slot_index)
    stream.arena.begin_write(slot_index)
    slot[:] = 0
    for spec in stream.layout.specs[4:]:
        layer = 3 if spec.name == "last_hidden_state" else int(spec.name.rpartition(".")[2])
        row_bytes = spec.size_bytes // PACK_TOKENS
        first = 0
        for length in pack.document_lengths:
            rng = np.random.default_rng([layer, salt, *pack.token_ids[first : first + length].tolist()])
            start = spec.offset_bytes + first * row_bytes
            slot[start : start + length * row_bytes] = rng.integers(0, 256, length * row_bytes).astype(np.uint8)
            first += length
    for spec in stream.layout.specs[:4]:
        write_tensor(slot, spec, tensors_of(pack)[spec.name])
    stream.arena.end_write(slot_index)
    return slot.copy()


CacheMaker = Callable[..., StateCache]


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[CacheMaker]:
    opened: list[StateCache] = []

    def open_it(target: CachedTarget = TARGET, budget: int = BUDGET) -> StateCache:
        opened.append(StateCache(StateStore(tmp_path / "cache", budget), target))
        return opened[-1]

    yield open_it
    for cache in opened:
        cache.close()


def keep(cache: StateCache, stream: SlotStream, slot_index: int, pack: Pack) -> None:
    cache.keep(stream, slot_index, cache.rows(stream, pack))
    assert cache.writer.wait_until_written(30)


def recall(cache: StateCache, stream: SlotStream, slot_index: int, pack: Pack) -> tuple[int, ...] | None:
    return cache.recall(stream, slot_index, pack, cache.rows(stream, pack))


FIRST, SECOND, THIRD = (5, 6, 7), (8, 9), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_comes_back_bit_for_bit(open_cache: CacheMaker, dtype: torch.dtype) -> None:
    cache = open_cache()
    stream = slot_stream((0, 2), last=True, dtype=dtype)
    compute(stream, 0, make_pack([FIRST, SECOND, THIRD]))
    keep(cache, stream, 0, make_pack([FIRST, SECOND, THIRD]))

    for documents in ([THIRD, FIRST, SECOND], [SECOND], [FIRST, FIRST]):  # as other packings lay them out
        other = make_pack(documents)
        expected = compute(stream, 0, other)
        stream.arena.slot(1)[:] = 255
        assert recall(cache, stream, 1, other) == ()
        size = stream.layout.size_bytes
        assert np.array_equal(stream.arena.slot(1)[:size], expected[:size])
        assert stream.arena.generation(1) % 2 == 0


def test_layers_are_shared_and_each_is_written_once(open_cache: CacheMaker) -> None:
    cache = open_cache()
    pack = make_pack([FIRST, SECOND])
    one = slot_stream((0, 2))
    compute(one, 0, pack)
    keep(cache, one, 0, pack)
    written = cache._store.numbers.bytes_written

    other = slot_stream((2, 3))
    assert recall(cache, other, 0, pack) is None, "of layer 3 there is nothing"
    expected = compute(other, 0, pack)
    keep(cache, other, 0, pack)
    assert cache._store.numbers.bytes_written == written * 3 // 2, "layer 2 is there already"
    assert recall(cache, other, 1, pack) == ()
    assert np.array_equal(other.arena.slot(1), expected)

    last = slot_stream((0,), last=True)  # the last hidden state is the output of the last layer, 3
    expected = compute(last, 0, pack)
    assert recall(cache, last, 1, pack) == ()
    assert np.array_equal(last.arena.slot(1), expected)


@pytest.mark.parametrize("other", [replace(TARGET, fingerprint="target-b"), None], ids=["target", "dtype"])
def test_nothing_is_shared_between(open_cache: CacheMaker, other: CachedTarget | None) -> None:
    cache = open_cache()
    pack = make_pack([FIRST])
    stream = slot_stream((0,))
    compute(stream, 0, pack)
    keep(cache, stream, 0, pack)
    cache.close()
    cache = open_cache(other or TARGET)
    assert recall(cache, stream if other else slot_stream((0,), dtype=torch.int32), 1, pack) is None


def test_documents_that_are_missing_are_named(open_cache: CacheMaker) -> None:
    cache = open_cache()
    stream = slot_stream((0, 2))
    compute(stream, 0, make_pack([FIRST, THIRD]))
    keep(cache, stream, 0, make_pack([FIRST, THIRD]))

    pack = make_pack([FIRST, SECOND, THIRD, SECOND])
    expected = compute(stream, 0, pack)
    stream.arena.slot(1)[:] = 255
    missing = recall(cache, stream, 1, pack)
    assert missing == (1, 3)
    part = part_of(pack, missing)
    assert part.document_lengths == (2, 2)
    assert part.token_ids.tolist() == [*SECOND, *SECOND]
    assert part.rows is not None
    slot = stream.arena.slot(1)
    for spec in stream.layout.specs[4:]:
        theirs, ours = (
            raw[spec.offset_bytes : spec.offset_bytes + spec.size_bytes].reshape(PACK_TOKENS, -1)
            for raw in (expected, slot)
        )
        for _, there in part.rows:
            assert (ours[there] == 255).all(), "left to the engine"
            ours[there] = theirs[there]
    assert np.array_equal(slot[: stream.layout.size_bytes], expected[: stream.layout.size_bytes])
    assert recall(cache, stream, 1, make_pack([SECOND])) is None


def test_a_compiled_target_computes_all_or_nothing(open_cache: CacheMaker) -> None:
    cache = open_cache(replace(TARGET, computes_documents=False))
    stream = slot_stream((0,))
    compute(stream, 0, make_pack([FIRST, THIRD]))
    keep(cache, stream, 0, make_pack([FIRST, THIRD]))
    assert recall(cache, stream, 1, make_pack([FIRST, SECOND])) is None
    assert cache._store.numbers.bytes_read == 0, "nobody would use it"
    assert recall(cache, stream, 1, make_pack([THIRD])) == ()


def test_a_damaged_record_is_computed_again(open_cache: CacheMaker) -> None:
    cache = open_cache()
    stream = slot_stream((0, 2))
    pack = make_pack([FIRST, SECOND])
    expected = compute(stream, 0, pack)
    keep(cache, stream, 0, pack)
    (path,) = cache._store.directory.glob("*.states")
    raw = bytearray(path.read_bytes())
    raw[3] ^= 4
    path.write_bytes(raw)
    assert recall(cache, stream, 1, pack) == (0,)
    assert cache._store.numbers.corrupt == 1
    compute(stream, 1, pack)
    keep(cache, stream, 1, pack)
    assert recall(cache, stream, 1, pack) == ()
    assert np.array_equal(stream.arena.slot(1), expected)


def test_a_disk_that_has_become_read_only_still_serves(open_cache: CacheMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache()
    stream, pack = slot_stream((0,)), make_pack([FIRST])
    size = stream.layout.size_bytes
    expected = compute(stream, 0, pack)[:size]
    keep(cache, stream, 0, pack)

    def refuse(fd: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(state_cache_segment.os, "utime", refuse)
    stream.arena.slot(1)[:] = 255
    assert recall(cache, stream, 1, pack) == ()
    assert np.array_equal(stream.arena.slot(1)[:size], expected)


def test_nobody_waits_for_a_disk_that_hangs(open_cache: CacheMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache()
    stream = slot_stream((0,))
    go_on = threading.Event()
    write_all = state_cache_segment.write_all

    def hang(fd: int, data: memoryview, offset: int) -> None:
        assert go_on.wait(60)
        write_all(fd, data, offset)

    monkeypatch.setattr(state_cache_segment, "write_all", hang)
    _, most = PACKS_WAITING
    packs = [make_pack([(number, number)]) for number in range(1, most + 4)]
    for pack in packs:
        compute(stream, 0, pack)
        cache.keep(stream, 0, cache.rows(stream, pack))  # the slot is used again at once
    assert cache.writer.not_kept == 3
    go_on.set()
    assert cache.writer.wait_until_written(30)
    for pack in packs[:most]:
        expected = compute(stream, 0, pack)
        assert recall(cache, stream, 1, pack) == ()
        assert np.array_equal(stream.arena.slot(1), expected)
    assert recall(cache, stream, 1, packs[-1]) is None


def test_a_full_disk_ends_the_caching_and_nothing_else(
    open_cache: CacheMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = open_cache()
    stream = slot_stream((0,))
    there, late = make_pack([FIRST]), make_pack([SECOND])
    compute(stream, 0, there)
    keep(cache, stream, 0, there)

    def full(_fd: int, _data: memoryview, _offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_cache_segment, "write_all", full)
    for _ in range(3):
        compute(stream, 0, late)
        keep(cache, stream, 0, late)
        assert recall(cache, stream, 1, there) == ()
        assert recall(cache, stream, 1, late) is None
    assert caplog.text.count("state_cache_stopped") == 1


def test_a_stream_whose_packs_are_larger_than_the_budget_is_computed(
    open_cache: CacheMaker, caplog: pytest.LogCaptureFixture
) -> None:
    cache = open_cache(budget=MIN_BYTES)
    stream = slot_stream((0,))
    pack = make_pack([FIRST])
    rows = [replace(cache.rows(stream, pack)[0], size=MIN_BYTES + 1)]
    for _ in range(2):
        assert cache.recall(stream, 0, pack, rows) is None
        cache.keep(stream, 0, rows)
    assert caplog.text.count("state_cache_too_small") == 1


def test_the_flags_go_together(tmp_path: Path) -> None:
    assert read_state_cache(None, None) is None
    assert read_state_cache(tmp_path, parse_size("1TiB")) == (tmp_path, 2**40)
    for directory, budget in ((tmp_path, None), (None, 2**40)):
        with pytest.raises(SlipstreamError, match="only one of them") as caught:
            read_state_cache(directory, budget)
        assert caught.value.reason is Reason.SPEC_INVALID


def test_a_budget_smaller_than_a_pack_is_refused(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "cache", MIN_BYTES)
    with pytest.raises(SlipstreamError, match="not even one pack") as caught:
        StateCache(store, TARGET, pack_tokens=MIN_BYTES // WIDTH // 4 + 1)
    assert caught.value.reason is Reason.ENVIRONMENT_UNSUPPORTED
    store.close()
