"""The arithmetic of benchmarks/pipeline.py: from what its processes said to the rows of its table."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.memory_slope import fit
from benchmarks.results_file import Row, spread

WAIT_LIMIT = 0.05
WARM_UP_PACKS = 32
"""Two shelves full: while the trainer compiles, the target computes ahead."""
WARM_UP_SHARE = 0.2
"""Of the tokens of a run whose memory is measured."""
GROWTH_BOUND = 0.5
"""MiB per million tokens: at 150,000 tokens/s 6 GiB a day."""
LARGEST_RATIO = 100.0
"""Of bound ÷ growth, which has no end where nothing grows."""


def steady(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of the steps after warm-up."""
    packs = len(records[0]["sequence_numbers"]) if records else 1
    return list(records[max(1, WARM_UP_PACKS // packs) :])


def trainer_pace(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Tokens per second of a trainer after warm-up, what it would reach without waiting, and the share of waiting."""
    counted = steady(records)
    seconds = sum(each["seconds"] for each in counted)
    waited = sum(each["data_wait_seconds"] for each in counted)
    tokens = counted[-1]["tokens"] - records[len(records) - len(counted) - 1]["tokens"]
    return {
        "steps": len(counted),
        "seconds": seconds,
        "wait_share": waited / seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_without_waiting": tokens / (seconds - waited),
    }


def aggregate_rate(committed: Sequence[Sequence[float]]) -> float:
    """Packs per second of several readers together, while all of them read.

    Args:
        committed: of every reader the times of its packs, on one clock, ascending; at least two in the common time.
    """
    begin, end = max(times[0] for times in committed), min(times[-1] for times in committed)
    assert end > begin, "the readers did not read at the same time"
    return sum(sum(begin < each <= end for each in times) for times in committed) / (end - begin)


def rows_of(answer: dict[str, Any]) -> list[Row]:
    """The rows that one part gives."""
    if "failed" in answer:
        return []
    return ROWS[answer["what"]](answer)


def _rows_of_wait(answer: dict[str, Any]) -> list[Row]:
    case, paces, alone = answer["case"], answer["trainer"], answer["target_packs_per_second"]
    shares = [pace["wait_share"] for pace in paces]
    speeds = [pace["tokens_per_second"] for pace in paces]
    own = statistics.median(pace["tokens_per_second_without_waiting"] for pace in paces)
    target = statistics.median(alone) * answer["pack_tokens"]
    share = statistics.median(shares)
    metric = "0.05 ÷ share of a step spent waiting for data"
    ratio = min(WAIT_LIMIT / share, LARGEST_RATIO) if share else LARGEST_RATIO
    # The promise is for a target that is the faster side: on another one the trainer has to wait.
    floor, goal = (1.0, 2.5) if target > own else (None, None)
    name = "tokens/s, target alone with one subscriber ÷ trainer without waiting"
    return [
        Row(case, metric, "", share, WAIT_LIMIT, "limit", ratio, spread(shares), floor, goal),
        Row(case, "tokens/s, trainer, padding included", "tokens/s", statistics.median(speeds), spread=spread(speeds)),
        Row(case, name, "tokens/s", target, own, "trainer without waiting", target / own, spread(alone)),
    ]


def _rows_of_subscribers(answer: dict[str, Any]) -> list[Row]:
    one, three = answer["one"], answer["three"]
    ratios = [many / single for many, single in zip(three, one, strict=True)]
    rate, base, ratio = (statistics.median(values) for values in (three, one, ratios))
    metric = "packs/s of all, three subscribers ÷ one"
    name = "one subscriber, same server, in turns"
    return [Row(answer["case"], metric, "packs/s", rate, base, name, ratio, spread(ratios), 2.8, 2.95)]


def _rows_of_ring(answer: dict[str, Any]) -> list[Row]:
    ring, out, back = (answer[name] for name in ("ring", "plain_write", "plain_read"))
    # What both directions give on average while both are busy: the ring moves every byte in each of them.
    plain = [(there + here) / 2 for there, here in zip(out, back, strict=True)]
    ratios = [ours / base for ours, base in zip(ring, plain, strict=True)]
    rate, base, ratio = (statistics.median(values) for values in (ring, plain, ratios))
    words = "D2H and H2D" if answer["device"] == "cuda" else "memcpy twice"
    metric = f"bytes/s, through the ring ÷ {words} at the same time"
    name = f"{words}, two processes at once, mean of both, in turns"
    row = Row(answer["case"], metric, "GB/s", rate / 1e9, base / 1e9, name, ratio, spread(ratios), 0.8, 0.95)
    return [row]


def _rows_of_memory(answer: dict[str, Any]) -> list[Row]:
    rows = []
    metric = "growth, MiB per million tokens: bound ÷ upper end of the 95 % interval"
    for name, growth in answer["growth"].items():
        if name.endswith("proportional"):
            continue  # other programs that share libraries with these processes change it as they come and go
        ratio = LARGEST_RATIO if growth["high"] <= 0 else min(GROWTH_BOUND / growth["high"], LARGEST_RATIO)
        case = f"{answer['case']}, {name}"
        rows.append(Row(case, metric, "MiB", growth["high"], GROWTH_BOUND, "bound", ratio, floor=1.0))
    return rows


ROWS = {"wait": _rows_of_wait, "subscribers": _rows_of_subscribers, "ring": _rows_of_ring, "memory": _rows_of_memory}


def growth_of(samples: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Slopes in MiB per million tokens by what was sampled, after warm-up.

    Args:
        samples: `tokens` that were trained at each, and MiB by name; in order.
    """
    warm = WARM_UP_SHARE * samples[-1]["tokens"]
    counted = [each for each in samples if each["tokens"] >= warm]
    million = [each["tokens"] / 1e6 for each in counted]
    names = sorted(counted[0].keys() - {"tokens"})
    slopes = {name: fit(million, [each[name] for each in counted]) for name in names}
    return {
        name: {
            "estimate": slope.estimate,
            "low": slope.low,
            "high": slope.high,
            "first_mib": counted[0][name],
            "last_mib": counted[-1][name],
        }
        for name, slope in slopes.items()
    }


def table(answers: Sequence[dict[str, Any]]) -> str:
    """Short, for people; what failed or was left out says so."""
    lines = []
    for answer in answers:
        for row in rows_of(answer):
            wanted = (
                "" if row.floor is None else f"  floor {row.floor:g}" + (f", goal {row.goal:g}" if row.goal else "")
            )
            ratio = "" if row.ratio is None else f"ratio {row.ratio:6.2f}"
            lines.append(f"{row.case:44} {row.metric:72} {row.ours:11,.3f} {row.unit:8} {ratio}{wanted}")
        if "failed" in answer:
            lines.append(f"{answer['what']}: {answer['failed']}")
        for name, growth in answer.get("growth", {}).items():
            numbers = ", ".join(f"{growth[key]:+.3f}" for key in ("estimate", "low", "high"))
            begin, end = growth["first_mib"], growth["last_mib"]
            lines.append(f"  {name}: {numbers} MiB per million tokens (estimate, 95 %); {begin:.1f} → {end:.1f} MiB")
    return "\n".join(lines) + "\n"
