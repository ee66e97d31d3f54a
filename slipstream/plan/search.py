"""The settings nearest to a recipe's with which a run fits: searched over a grid of changes, each with a price.

A price says how much a change is regretted. Cheap is what leaves the result as it is: a smaller chunk of logits, fewer
packs ready, layers computed again, no graphs. Dear is what trains something else: fewer anchors, a shorter pack,
another optimizer, fewer layers. The cheapest combination that fits is the nearest.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from slipstream.plan.memory import chunk_blocks, plan_memory
from slipstream.plan.sizes import TILE, RunSizes

_ANCHOR_MULTIPLE = 8
_LEAST_PREFETCH = 2
_MOST_TRIED = 10_000
"""Combinations, about half a second."""
_ALL_TRIED = 16
"""Of a drafter of at most so many layers, every smaller number is a setting."""


@dataclass(frozen=True)
class Change:
    """One setting to another value; `price` 0 leaves it as it is."""

    settings: tuple[str, ...]
    """Overrides, as `--set` takes them."""
    price: float
    applied: Callable[[RunSizes], RunSizes]


@dataclass(frozen=True)
class Fit:
    """Changes with which a run fits, and what it then needs."""

    settings: tuple[str, ...]
    price: float
    peak_bytes: int


def nearest_fit(sizes: RunSizes, limit_bytes: int, device_bytes: int) -> Fit | None:
    """The cheapest changes with which the run fits; None where none of the grid does.

    Where very many are cheaper, the cheapest of a coarse grid: each setting as it is, in the middle, or at its end.

    Args:
        sizes: as the recipe has them.
        limit_bytes: what the run may use of the device.
        device_bytes: what the device has, which decides the default chunk of the loss.
    """
    knobs = [sorted(knob, key=_price) for knob in _knobs(sizes, device_bytes)]
    extremes = itertools.product(*((knob[0], knob[-1]) for knob in knobs))
    if all(_peak(sizes, changes, device_bytes) > limit_bytes for changes in extremes):
        return None
    cheap_first = itertools.islice(_from_cheap_to_dear(knobs), _MOST_TRIED)
    coarse = [sorted({0, len(knob) // 2, len(knob) - 1}) for knob in knobs]
    coarse_first = _from_cheap_to_dear(
        [[knob[level] for level in levels] for knob, levels in zip(knobs, coarse, strict=True)]
    )
    for price, changes in itertools.chain(cheap_first, coarse_first):
        peak = _peak(sizes, changes, device_bytes)
        if peak <= limit_bytes:
            found = Fit(tuple(setting for change in changes for setting in change.settings), price, peak)
            # What is enough alone is searched in the whole grid, and may be nearer than the nearest of the coarse one.
            return min((found, *single_fits(sizes, limit_bytes, device_bytes)), key=lambda fit: fit.price)
    return None


def _from_cheap_to_dear(knobs: list[list[Change]]) -> Iterator[tuple[float, tuple[Change, ...]]]:
    """All combinations with their prices, so that the first that fits is the nearest."""
    start = (0,) * len(knobs)
    waiting, seen = [(0.0, start)], {start}
    while waiting:
        price, levels = heapq.heappop(waiting)
        yield price, tuple(knob[level] for knob, level in zip(knobs, levels, strict=True))
        for index, knob in enumerate(knobs):
            level = levels[index] + 1
            further = (*levels[:index], level, *levels[index + 1 :])
            if level < len(knob) and further not in seen:
                seen.add(further)
                heapq.heappush(waiting, (price + knob[level].price - knob[level - 1].price, further))


def single_fits(sizes: RunSizes, limit_bytes: int, device_bytes: int) -> list[Fit]:
    """For every setting that is enough alone: the least change of it. Arguments as of `nearest_fit`."""
    found = []
    for knob in _knobs(sizes, device_bytes):
        for change in sorted(knob, key=_price):
            peak = _peak(sizes, (change,), device_bytes)
            if change.settings and peak <= limit_bytes:
                found.append(Fit(change.settings, change.price, peak))
                break
    return sorted(found, key=lambda fit: fit.price)


def _price(change: Change) -> float:
    return change.price


def _peak(sizes: RunSizes, changes: tuple[Change, ...], device_bytes: int) -> int:
    for change in changes:
        sizes = change.applied(sizes)
    return plan_memory(sizes, device_bytes).peak_bytes


def _knobs(sizes: RunSizes, device_bytes: int) -> list[Iterator[Change]]:
    return [
        _chunks(sizes, device_bytes),
        _steps("stream.prefetch_packs", "prefetch_packs", sizes, {_LEAST_PREFETCH}, 0.1),
        _checkpointing(sizes),
        _flag("train.cuda_graphs=false", sizes.cuda_graphs, {"cuda_graphs": False}, 0.2),
        _steps(
            "train.anchors_per_pack", "anchors_per_pack", sizes, _shares(sizes.anchors_per_pack, _ANCHOR_MULTIPLE), 2.0
        ),
        _steps("data.pack_tokens", "pack_tokens", sizes, _pack_lengths(sizes), 3.0),
        _steps("train.packs_per_step", "packs_per_step", sizes, _halves(sizes.packs_per_step), 2.5),
        _flag("optimizer.kind=muon", sizes.optimizer == "adamw", {"optimizer": "muon"}, 4.0),
        _flag("optimizer.ema_decay=", sizes.moving_average, {"moving_average": False}, 4.0),
        _layers(sizes),
    ]


def _chunks(sizes: RunSizes, device_bytes: int) -> Iterator[Change]:
    yield _as_it_is()
    rows = chunk_blocks(sizes, device_bytes) * (sizes.block_size - 1)
    for halvings in range(1, 6):
        smaller = rows >> halvings
        if smaller >= sizes.block_size - 1:
            yield _change((f"loss.chunk_rows={smaller}",), 0.1 * halvings, {"chunk_rows": smaller})


def _checkpointing(sizes: RunSizes) -> Iterator[Change]:
    """Not the last layer: what is inside it is there anyway when its backward begins."""
    yield _as_it_is()
    for count in sorted(_counts_below(sizes.num_layers)):
        if count > sizes.checkpointed_layers:
            more = (count - sizes.checkpointed_layers) / sizes.num_layers
            yield _change((f"train.activation_checkpointing={count}",), 0.5 * more, {"checkpointed_layers": count})


def _layers(sizes: RunSizes) -> Iterator[Change]:
    """Features stay as many as they are."""
    yield _as_it_is()
    if sizes.layers_are_named:
        return
    for fewer in sorted(_counts_below(sizes.num_layers), reverse=True):
        settings = (f"drafter.num_layers={fewer}", f"drafter.num_features={sizes.num_features}")
        yield _change(settings, 8.0 * math.log2(sizes.num_layers / fewer), {"num_layers": fewer})


def _counts_below(number: int) -> set[int]:
    """All, or of many the smallest powers of two and all sixteenths."""
    if number <= _ALL_TRIED:
        return set(range(1, number))
    return {1, 2, 4, 8} | {number * share // 16 for share in range(1, 16)}


def _flag(setting: str, possible: bool, values: dict[str, Any], price: float) -> Iterator[Change]:
    yield _as_it_is()
    if possible:
        yield _change((setting,), price, values)


def _steps(setting: str, field: str, sizes: RunSizes, values: set[int], price: float) -> Iterator[Change]:
    """`price`: of half the value."""
    yield _as_it_is()
    now: int = getattr(sizes, field)
    for value in sorted(values, reverse=True):
        if value < now:
            yield _change((f"{setting}={value}",), price * math.log2(now / value), {field: value})


def _shares(value: int, multiple: int) -> set[int]:
    """Eighths of a value, and halves of an eighth, that are multiples."""
    eighths = {value * share // 64 // multiple * multiple for share in (56, 48, 40, 32, 24, 16, 8, 4, 2)}
    return {share for share in eighths if share > 0}


def _pack_lengths(sizes: RunSizes) -> set[int]:
    """Quarters of the length that hold the longest document."""
    lengths = {sizes.pack_tokens * share // 8 // TILE * TILE for share in (6, 4, 2, 1)}
    return {length for length in lengths if length >= max(TILE, sizes.least_pack_tokens)}


def _halves(value: int) -> set[int]:
    return {value >> halvings for halvings in range(1, value.bit_length())}


def _as_it_is() -> Change:
    return Change((), 0.0, lambda sizes: sizes)


def _change(settings: tuple[str, ...], price: float, values: dict[str, Any]) -> Change:
    return Change(settings, price, lambda sizes: replace(sizes, **values))
