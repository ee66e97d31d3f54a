"""From trainings and measured drafters of benchmarks/quality.py to its rows, with floors and goals, and its table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.accepted_length import Measured, interval, kept, ratio_interval
from benchmarks.results_file import Row

FLOORS = {"gsm8k": 1.2, "humaneval": 1.15, "arena": 1.15}
GOAL = 1.5
THIRD = 3.0
PEER = "SpecForge 0.2.0 DFlash, target in its process, same seconds, prompts and evaluator"


def best_try(work: Path, side: str) -> list[str] | None:
    """Settings of the side's measured try with the largest accepted length, mean over sources; None without tries."""
    found = []
    for path in sorted((work / "trainings").glob(f"try-{side}-*.json")):
        training, lengths = kept(path), kept(work / "lengths" / f"{path.stem}@end.json")
        if training and lengths:
            found.append((_mean_length(Measured.of(lengths)), training["asked"]["settings"]))
    return max(found)[1] if found else None


def _mean_length(measured: Measured) -> float:
    return fmean(measured.accepted_length(source) for source in measured.tokens)


def make_rows(trained: Mapping[str, dict[str, Any]], lengths: Mapping[str, dict[str, Any]]) -> list[Row]:
    """What was measured of what `It must show` asks for.

    Args:
        trained: by name, see `Quality`.
        lengths: by `NAME@end`, and `ours@SECONDSs` on the way.
    """
    measured = {name: Measured.of(answer) for name, answer in lengths.items()}
    peer = measured.get("peer@end")
    rows = []
    for name, label in (("ours", "ours"), ("ours-more-data", "ours, more data")):
        if f"{name}@end" in measured:
            rows += _length_rows(label, measured[f"{name}@end"], peer, floors=name == "ours")
    if peer is not None:
        rows += _time_rows(trained, measured, peer)
    if peer is not None and "ours-third@end" in measured:
        rows += _third_rows(trained, measured["ours-third@end"], peer)
    if {"ours", "peer"} <= trained.keys():
        rows.append(_speed_row(trained))
    return rows


def _case(label: str, measured: Measured, source: str) -> str:
    return f"{label}, {source}, {len(measured.table(source))} prompts"


def _length_rows(label: str, ours: Measured, peer: Measured | None, *, floors: bool) -> list[Row]:
    rows = []
    for source in ours.sources:
        length = ours.accepted_length(source)
        if peer is None:
            metric = "accepted length, bonus included"
            rows.append(Row(_case(label, ours, source), metric, "tokens", length, interval=interval(ours, source)))
            continue
        theirs = peer.accepted_length(source)
        floor = FLOORS.get(source) if floors else None
        rows.append(
            Row(
                _case(label, ours, source),
                "accepted length, bonus included, ours ÷ peer",
                "tokens",
                length,
                theirs,
                PEER,
                length / theirs,
                floor=floor,
                goal=GOAL if floor else None,
                interval=ratio_interval(ours, peer, source),
            )
        )
    return rows


def _time_rows(trained: Mapping[str, dict[str, Any]], measured: Mapping[str, Measured], peer: Measured) -> list[Row]:
    """When our run, still far from annealed, passes what the peer has at its end."""
    if "ours@end" not in measured:
        return []
    curve = sorted((float(name.removeprefix("ours@").removesuffix("s")), one) for name, one in measured.items()
                   if name.startswith("ours@") and name != "ours@end")  # fmt: skip
    curve.append((trained["ours"]["seconds"], measured["ours@end"]))
    rows = []
    for source in peer.sources:
        points = [(seconds, one.accepted_length(source)) for seconds, one in curve]
        reached = time_to_reach(points, peer.accepted_length(source))
        if reached is not None:
            theirs = trained["peer"]["seconds"]
            floor = THIRD if source in FLOORS else None
            metric = "the peer's seconds ÷ ours until ours, not annealed yet, reaches the peer's final accepted length"
            case = _case("time", peer, source)
            rows.append(Row(case, metric, "s", reached, theirs, PEER, theirs / reached, floor=floor))
    return rows


def time_to_reach(points: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """Seconds at which a curve of (seconds, accepted length), from (0, 1) on, first has `wanted`; None: never."""
    before = (0.0, 1.0)
    for seconds, length in points:
        if length >= wanted:
            share = (wanted - before[1]) / (length - before[1]) if length > before[1] else 1.0
            return before[0] + max(share, 0.0) * (seconds - before[0]) or seconds
        before = (seconds, length)
    return None


def _third_rows(trained: Mapping[str, dict[str, Any]], third: Measured, peer: Measured) -> list[Row]:
    share = trained["peer"]["seconds"] / trained["ours-third"]["seconds"]
    rows = []
    for source in peer.sources:
        length, theirs = third.accepted_length(source), peer.accepted_length(source)
        metric = f"accepted length of ours annealed to 1/{share:.1f} of the peer's time ÷ the peer's"
        floor = 1.0 if source in FLOORS else None
        case = _case("a third of the time", peer, source)
        rows.append(
            Row(case, metric, "tokens", length, theirs, PEER, length / theirs, None, floor,
                interval=ratio_interval(third, peer, source))
        )  # fmt: skip
    return rows


def _speed_row(trained: Mapping[str, dict[str, Any]]) -> Row:
    ours, peer = trained["ours"]["tokens_per_second"], trained["peer"]["tokens_per_second"]
    metric = "trained tokens/s (ours with padding, the peer's without), ours ÷ peer"
    return Row("speed", metric, "tokens/s", ours, peer, PEER, ours / peer, floor=1.0)


def table(
    trained: Mapping[str, dict[str, Any]],
    lengths: Mapping[str, dict[str, Any]],
    rows: Sequence[Row],
    left_out: Sequence[str],
) -> str:
    """Short, for people: trainings, drafters, rows."""
    lines = [f"{'training':16}{'steps':>8}{'seconds':>9}{'tokens/s':>10}  settings"]
    for name, run in trained.items():
        settings = ", ".join(run["asked"]["settings"]) or "as the recipe says"
        lines.append(f"{name:16}{run['steps']:>8}{run['seconds']:>9.1f}{run['tokens_per_second']:>10,.0f}  {settings}")
    if lengths:
        sources = Measured.of(next(iter(lengths.values()))).sources
        lines += ["", f"{'accepted length':22}" + "".join(f"{source:>22}" for source in sources)]
    for name, answer in lengths.items():
        one = Measured.of(answer)
        shown = [
            f"{one.accepted_length(source):.3f} [{low:.2f}, {high:.2f}]"
            for source in one.sources
            for low, high in [interval(one, source)]
        ]
        beyond = f"  {answer['beyond_the_gap']} OUTPUTS ARE NOT THE TARGET'S" if answer["beyond_the_gap"] else ""
        lines.append(f"{name:22}" + "".join(f"{text:>22}" for text in shown) + beyond)
    lines.append("")
    for row in rows:
        if row.ratio is not None:
            wanted = (
                "" if row.floor is None else f"  floor {row.floor:g}" + (f", goal {row.goal:g}" if row.goal else "")
            )
            verdict = "" if row.floor is None else ("  ok" if row.ratio >= row.floor else "  BELOW FLOOR")
            spread = "" if row.interval is None else f" [{row.interval[0]:.2f}, {row.interval[1]:.2f}]"
            lines.append(f"{row.case}: {row.metric} = {row.ratio:.2f}{spread}{wanted}{verdict}")
    lines += [f"left out: {text}" for text in left_out]
    return "\n".join(lines) + "\n"
