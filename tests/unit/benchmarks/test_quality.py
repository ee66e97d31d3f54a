"""The comparison of trainings: schedules by the clock, paired intervals, curves that pass an end, rows."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.accepted_length import ALL, Measured, difference_interval, interval, keep, kept, ratio_interval
from benchmarks.gpu_queue import Budget, spread
from benchmarks.quality import on_the_way
from benchmarks.quality_rows import best_try, make_rows, table, time_to_reach
from benchmarks.timed_trainer import ClockSchedule
from drafter_trainer.schedule import learning_rate
from slipstream.run_spec.spec import OptimizerSpec


def test_rate_follows_the_clock_and_the_run_ends_with_it() -> None:
    standing, now = SimpleNamespace(total_steps=1_000_000), 100.0
    spec = OptimizerSpec(learning_rate=1.0, warmup_fraction=0.1)
    rate = ClockSchedule(standing, 10.0, learning_rate, lambda: now)
    assert rate(spec, 0, 7) < 1e-4
    now = 100.5
    assert rate(spec, 1, 7) == pytest.approx(0.5, rel=1e-4)
    now = 105.5
    assert rate(spec, 2, 7) == pytest.approx(0.5, rel=1e-4)
    assert standing.total_steps == 1_000_000
    now = 110.1
    assert rate(spec, 3, 7) < 1e-9
    assert standing.total_steps == 4


def _measured(*tokens: int) -> Measured:
    return Measured({"s": list(tokens)}, {"s": [10] * len(tokens)})


def test_intervals_are_paired() -> None:
    hard, easy = _measured(11, 40, 12, 35), _measured(22, 80, 24, 70)
    assert hard.accepted_length("s") == hard.accepted_length(ALL) == pytest.approx(2.45)
    low, high = interval(hard, "s")
    assert low < 1.7 and high > 3.0
    # Twice as much on every prompt is exactly twice as much, however the prompts differ.
    assert ratio_interval(easy, hard, ALL) == pytest.approx((2.0, 2.0))
    low, high = difference_interval(easy, hard, "s")
    assert low == pytest.approx(interval(hard, "s")[0]) and high == pytest.approx(interval(hard, "s")[1])


def test_when_a_curve_reaches_a_length() -> None:
    curve = [(10.0, 1.5), (20.0, 1.4), (30.0, 2.0)]
    assert time_to_reach(curve, 1.25) == pytest.approx(5.0)
    assert time_to_reach(curve, 1.7) == pytest.approx(25.0)
    assert time_to_reach(curve, 2.1) is None


def test_checkpoints_on_the_way_are_those_nearest() -> None:
    drafters: list[list[Any]] = [[float(seconds), f"step-{seconds}"] for seconds in (9, 30, 55, 100)]
    assert on_the_way(drafters, (0.1, 0.5, 0.55, 0.99)) == [(9.0, "step-9"), (55.0, "step-55")]


def test_rows_have_floors_and_say_who_was_slower() -> None:
    def answer(tokens: int) -> dict[str, Any]:
        return {"tokens": {"gsm8k": [tokens] * 3}, "rounds": {"gsm8k": [10] * 3}, "beyond_the_gap": 0}

    def training(seconds: float, speed: float) -> dict[str, Any]:
        return {"steps": 9, "seconds": seconds, "tokens_per_second": speed, "asked": {"settings": []}}

    trained = {"ours": training(210.0, 3e5), "peer": training(210.0, 1e5), "ours-third": training(70.0, 3e5)}
    lengths = {"ours@end": answer(30), "ours@35s": answer(20), "peer@end": answer(20), "ours-third@end": answer(25)}
    rows = {(row.case, row.metric.partition(" ")[0]): row for row in make_rows(trained, lengths)}
    first = rows["ours, gsm8k, 3 prompts", "accepted"]
    assert (first.ratio, first.floor, first.goal, first.interval) == (1.5, 1.2, 1.5, (1.5, 1.5))
    reached = rows["time, gsm8k, 3 prompts", "the"]
    assert (reached.ours, reached.ratio, reached.floor) == (35.0, 6.0, 3.0)
    third = rows["a third of the time, gsm8k, 3 prompts", "accepted"]
    assert (third.ratio, third.floor) == (1.25, 1.0)
    assert rows["speed", "trained"].ratio == pytest.approx(3.0)
    assert "goal 1.5  ok" in table(trained, lengths, list(rows.values()), ["x: no time"])


def test_best_try_has_the_largest_mean_over_sources(tmp_path: Path) -> None:
    assert best_try(tmp_path, "ours") is None
    for index, tokens in enumerate(((20, 20), (30, 12), (21, 20))):
        asked = {"asked": {"settings": [f"rate={index}"]}}
        keep(tmp_path / "trainings" / f"try-ours-{index}.json", asked)
        lengths = {"tokens": {"a": [tokens[0]], "b": [tokens[1]]}, "rounds": {"a": [10], "b": [10]}}
        keep(tmp_path / "lengths" / f"try-ours-{index}@end.json", lengths)
    assert best_try(tmp_path, "ours") == ["rate=1"]
    assert kept(tmp_path / "lengths" / "nothing.json") is None


def test_work_is_shared_by_gpus_and_ends_with_the_time() -> None:
    taken: list[tuple[int, int]] = []
    both = threading.Barrier(2, timeout=30)

    def work(gpu: int, items: Iterator[int]) -> None:
        taken.append((gpu, next(items)))
        both.wait()
        taken.extend((gpu, item) for item in items)

    spread([0, 1], list(range(9)), work, Budget(None))
    assert sorted(item for _, item in taken) == list(range(9))
    assert {gpu for gpu, _ in taken} == {0, 1}

    now = itertools.count(0.0, 5.0)
    budget = Budget(12.0, lambda: next(now))
    assert budget.allows(7.0) and not budget.allows(7.0) and budget.stopped()


def test_a_failure_stops_the_others() -> None:
    budget = Budget(None)

    def work(gpu: int, items: Iterator[int]) -> None:
        if gpu == 1:
            raise RuntimeError("broken")
        assert budget._stopped.wait(30)
        assert next(items, None) is None

    with pytest.raises(RuntimeError, match="broken"):
        spread([0, 1], [1, 2, 3], work, budget)
