"""The benchmark of target and trainers: its shares and ratios are turned the right way, its slopes have intervals."""

import os
import random
from typing import Any

import pytest

from benchmarks import memory_slope
from benchmarks.pipeline import tokens
from benchmarks.pipeline_rows import aggregate_rate, growth_of, rows_of, table, trainer_pace


def record(step: int, seconds: float, wait: float) -> dict[str, object]:
    return {
        "step": step, "sequence_numbers": [step], "tokens": 100 * (step + 1), "seconds": seconds,
        "data_wait_seconds": wait,
    }  # fmt: skip


def test_pace_after_warm_up() -> None:
    pace = trainer_pace([record(step, 9.0, 8.0) for step in range(32)] + [record(step, 2.0, 0.5) for step in (32, 33)])
    assert pace == {
        "steps": 2, "seconds": 4.0, "wait_share": 0.25, "tokens_per_second": 50.0,
        "tokens_per_second_without_waiting": 200 / 3,
    }  # fmt: skip


def test_rate_of_readers_is_that_of_their_common_time() -> None:
    assert aggregate_rate([[0.0, 1.0, 2.0, 3.0]]) == 1.0
    # From 1.0 to 3.0: two of the first, four of the second.
    assert aggregate_rate([[0.0, 1.0, 2.0, 3.0], [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]]) == 3.0


def test_wait_has_a_floor_only_where_the_target_is_faster() -> None:
    pace = {"wait_share": 0.02, "tokens_per_second": 98.0, "tokens_per_second_without_waiting": 100.0}
    answer = {
        "what": "wait",
        "case": "c",
        "pack_tokens": 10,
        "target_packs_per_second": [11.0, 12.0],
        "trainer": [pace],
    }
    wait, speed, faster = rows_of(answer)
    assert (wait.ours, wait.ratio, wait.floor, wait.goal) == (0.02, 2.5, 1.0, 2.5)
    assert (speed.ours, faster.ratio) == (98.0, 1.15)
    wait, *_ = rows_of(answer | {"target_packs_per_second": [9.0]})
    assert (wait.ratio, wait.floor) == (2.5, None)
    wait, *_ = rows_of(answer | {"trainer": [pace | {"wait_share": 0.0}]})
    assert wait.ratio == 100.0


def test_ratios_of_pairs_and_what_failed() -> None:
    answers: list[dict[str, Any]] = [
        {"what": "subscribers", "case": "c", "one": [2.0, 1.0, 4.0], "three": [6.0, 2.5, 10.0]},
        {"what": "ring", "case": "c", "device": "cuda", "ring": [45e9], "plain_write": [60e9], "plain_read": [40e9]},
        {"what": "memory", "failed": "no time"},
    ]
    rows = [row for answer in answers for row in rows_of(answer)]
    assert [(row.ours, row.baseline, row.ratio, row.floor) for row in rows] == [
        (6.0, 2.0, 2.5, 2.8),
        (45, 50, 0.9, 0.8),
    ]
    assert rows[1].spread is None
    assert "memory: no time" in table(answers)


def test_slope_of_memory_that_grows_and_of_memory_that_is_flat() -> None:
    work = [index / 10 for index in range(100)]
    draws = random.Random(0)
    noise = [draws.uniform(-0.5, 0.5) for _ in work]
    growing = memory_slope.fit(work, [100 + 3 * done + each for done, each in zip(work, noise, strict=True)])
    assert 2.8 < growing.low < growing.estimate < growing.high < 3.2
    flat = memory_slope.fit(work, [100 + each for each in noise])
    assert flat.low < 0 < flat.high < 0.5


def test_growth_is_that_after_warm_up() -> None:
    early = [{"tokens": 1e5 * index, "trainer, private": 100.0 * index} for index in range(1, 20)]
    late = [{"tokens": 2e6 + 1e5 * index, "trainer, private": 2000.0 + 0.025 * index} for index in range(81)]
    growth = growth_of([*early, *late])
    assert growth["trainer, private"]["estimate"] == pytest.approx(0.25)
    answer = {"what": "memory", "case": "c", "growth": growth}
    (row,) = rows_of(answer)
    assert row.ratio == pytest.approx(2.0) and row.floor == 1.0
    assert "+0.250" in table([answer]) and "2000.0 → 2002.0 MiB" in table([answer])


def test_tokens_as_people_write_them() -> None:
    assert [tokens(text) for text in ("10M", "0.3M", "300k", "128")] == [10**7, 300_000, 300_000, 128]


@pytest.mark.skipif(memory_slope.why_not_here() is not None, reason=str(memory_slope.why_not_here()))
def test_memory_of_a_process() -> None:
    found = memory_slope.process_memory(os.getpid())
    assert 1 < found["private"] <= found["resident"] and 1 < found["proportional"] <= found["resident"]
