"""From the measurements of benchmarks/train_step.py to its rows, with floors and goals, and to its table."""

import dataclasses
import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.flops import step_flops, total_tflop
from benchmarks.peers.workload import SIZES, TINY, mean_tokens
from benchmarks.results_file import Row

MEMORY_BASELINE_GIB = 26.0
LENGTHS_BASELINE_GB = 64.7
FIRST_STEP_BASELINE_SECONDS = 20.0
LOSS_TOLERANCE = {"ours-fp8": 1e-2}
LOSS_TOLERANCE_BF16 = 2e-3
"""First losses of two sides, relative: equal weights and data, rounded in another order."""
FLOORS = {
    ("A", "ours", "specforge"): (1.4, 1.6),
    ("A", "ours-fp8", "specforge"): (1.7, 2.0),
    ("C", "ours", "specforge"): (5.0, 8.0),
    ("C", "ours-graphs", "specforge"): (5.0, 8.0),
    ("CR", "ours-graphs", "specforge"): (5.0, 8.0),
    ("CR8", "ours-graphs", "specforge"): (5.0, 8.0),
}
"""Floor and goal of a peer's step time ÷ ours."""
OTHER_LOSS = ("specforge-shipped", "ours-graphs-kl")
OURS = ("ours", "ours-fp8", "ours-graphs")
PEERS = ("specforge", "specforge-compiled", "specforge-shipped", "speculators")


@dataclass
class Measured:
    """What is known of one side at one size."""

    size: str
    variant: str
    failed: str | None = None
    build: dict[str, Any] = field(default_factory=dict)
    milliseconds: list[float] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    ratios: list[float] = field(default_factory=list)
    """Per round: this side's median step time ÷ ours (bf16) of the same round."""
    lengths: dict[str, Any] = field(default_factory=dict)
    forward_backward: dict[str, Any] = field(default_factory=dict)
    first_step_seconds: float | None = None

    @property
    def step_ms(self) -> float:
        """Median."""
        return statistics.median(self.milliseconds)

    @property
    def spread(self) -> float:
        """Inter-quartile range ÷ median."""
        if len(self.milliseconds) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.milliseconds, n=4)
        return (high - low) / self.step_ms

    @property
    def tflops(self) -> float:
        """Nominal TFLOP/s; of documents of real lengths as if they were equally long."""
        return total_tflop(SIZES.get(self.size, TINY)) / self.step_ms * 1e3

    @property
    def tokens_per_second(self) -> float:
        """Of documents."""
        return mean_tokens(SIZES.get(self.size, TINY)) / self.step_ms * 1e3

    def as_json(self, peak: float | None) -> dict[str, Any]:
        """Everything, with what follows from it."""
        size = SIZES.get(self.size, TINY)
        content = dataclasses.asdict(self)
        content["nominal_tflop_by_term"] = step_flops(size)
        content["strictly_necessary_tflop"] = total_tflop(size, strict=True)
        if self.milliseconds:
            content |= {"step_ms": self.step_ms, "tflops": self.tflops, "tokens_per_second": self.tokens_per_second}
            content["share_of_peak"] = self.tflops / peak if peak else None
        return content


def make_rows(measured: list[Measured], peak: float | None) -> list[Row]:
    """Step times, and every ratio that has a floor."""
    timed = {(m.size, m.variant): m for m in measured if m.milliseconds}
    rows = [Row(f"{m.size}, {m.variant}", "step time", "ms", m.step_ms, spread=m.spread) for m in timed.values()]
    for (size, variant), other in timed.items():
        if variant in PEERS:
            rows += _ratios_to(other, timed, size)
    for m in measured:
        rows += _own_rows(m, peak)
    return rows or [Row("nothing", "sides that ran", "", 0.0)]


def _ratios_to(peer: Measured, timed: dict[tuple[str, str], Measured], size: str) -> list[Row]:
    """A peer's step time ÷ ours; our variants took turns with our plain bf16 step, as peers did: ratios share that."""
    rows = []
    to_ours = statistics.median(peer.ratios) if peer.ratios else None
    for variant in OURS:
        ours = timed.get((size, variant))
        if ours is None or to_ours is None:
            continue
        own = statistics.median(ours.ratios) if ours.ratios else 1.0
        floor, goal = FLOORS.get((size, variant, peer.variant), (None, None))
        spread = (max(peer.ratios) - min(peer.ratios)) / to_ours
        ratio = to_ours / own
        metric = f"{peer.variant} step time ÷ {variant}"
        case = f"{size}, {variant}"
        rows.append(
            Row(case, metric, "ms", ours.step_ms, peer.step_ms, peer.variant, ratio, spread, floor=floor, goal=goal)
        )
    return rows


def _own_rows(m: Measured, peak: float | None) -> list[Row]:
    rows = []
    if (m.size, m.variant) == ("A", "ours") and m.milliseconds:
        if peak:
            share = m.tflops / peak
            metric = "nominal TFLOP/s ÷ measured matmul peak"
            rows.append(Row("A, ours", metric, "TFLOP/s", m.tflops, peak, "8192³ bf16", share, floor=0.68, goal=0.77))
        allocated = m.memory["allocated_gib"]
        if allocated:
            ratio = MEMORY_BASELINE_GIB / allocated
            metric = "26 GiB ÷ peak allocated memory"
            rows.append(
                Row("A, ours", metric, "GiB", allocated, MEMORY_BASELINE_GIB, "bound", ratio, floor=1.0, goal=1.13)
            )
    if m.forward_backward:
        used = m.forward_backward["peak_gb"]
        name, ratio = "the replaced design", LENGTHS_BASELINE_GB / used
        metric = "forward and backward at 4000 tokens, no optimizer: 64.7 GB ÷ peak"
        rows.append(
            Row(f"{m.size}, {m.variant}", metric, "GB", used, LENGTHS_BASELINE_GB, name, ratio, floor=1.8, goal=2.3)
        )
    if m.lengths:
        case = f"B, ours, {m.lengths['steps']} steps of random lengths"
        rows.append(Row(case, "graphs compiled after the warm-up", "", m.lengths["graphs_compiled_meanwhile"]))
        rows.append(Row(case, "growth of allocated memory, second half", "GiB", m.lengths["allocated_growth_gib"]))
        rows.append(Row(case, "growth of reserved memory, second half", "GiB", m.lengths["reserved_growth_gib"]))
    if m.first_step_seconds is not None:
        warm, limit = "warm" in m.variant, FIRST_STEP_BASELINE_SECONDS
        ratio = limit / m.first_step_seconds
        floor, goal = (1.0, 2.0) if warm else (None, None)
        metric = "20 s ÷ time from exec to the first step"
        case = f"{m.size}, {m.variant}"
        rows.append(Row(case, metric, "s", m.first_step_seconds, limit, "bound", ratio, floor=floor, goal=goal))
    return rows


def table(measured: list[Measured], rows: list[Row], peak: float | None) -> str:
    """What is read first: one line a side, then one line a ratio."""
    lines = [
        f"{'size':<5}{'side':<20}{'ms':>8}{'iqr':>6}{'÷ ours':>8}{'TFLOP/s':>9}{'share':>7}{'alloc':>7}{'resvd':>7}"
        f"{'ktok/s':>8}{'loss 1':>9}  attention+products+optimizer+rest, ms"
    ]
    first_losses: dict[str, float] = {}
    for m in measured:
        lines.append(_line(m, peak, first_losses))
    lines.append(f"matmul peak {peak:.0f} TFLOP/s" if peak else "matmul peak not measured")
    for row in rows:
        if row.ratio is not None:
            wanted = "" if row.floor is None else f"  floor {row.floor:g}, goal {row.goal:g}"
            verdict = "" if row.floor is None else ("  ok" if row.ratio >= row.floor else "  BELOW FLOOR")
            spread = "" if row.spread is None else f" (rounds differ by {row.spread:.1%})"
            lines.append(f"{row.case}: {row.metric} = {row.ratio:.2f}{spread}{wanted}{verdict}")
        elif row.metric != "step time":
            lines.append(f"{row.case}: {row.metric} = {row.ours:.3g} {row.unit}")
    return "\n".join(lines)


def _line(m: Measured, peak: float | None, first_losses: dict[str, float]) -> str:
    start = f"{m.size:<5}{m.variant:<20}"
    if m.failed and not m.milliseconds:
        return f"{start} failed: {m.failed}"
    if not m.milliseconds:
        seconds = "" if m.first_step_seconds is None else f"first step after {m.first_step_seconds:.1f} s"
        return f"{start} {seconds}"
    loss = m.build["losses"][0]
    expected = first_losses.setdefault(m.size, loss)
    note = ""
    tolerance = LOSS_TOLERANCE.get(m.variant, LOSS_TOLERANCE_BF16)
    if abs(loss - expected) > tolerance * expected and m.variant not in OTHER_LOSS:
        note = "  LOSS DIFFERS: not the same work"
    share = f"{m.tflops / peak:>7.2f}" if peak else f"{'':>7}"
    ratio = f"{statistics.median(m.ratios):>8.2f}" if m.ratios else f"{1 if m.variant == 'ours' else '':>8}"
    parts = "+".join(f"{ms:.1f}" for ms in m.profile.get("ms_by_part", {}).values())
    return (
        f"{start}{m.step_ms:>8.1f}{m.spread:>6.1%}{ratio}{m.tflops:>9.0f}{share}{m.memory['allocated_gib']:>7.1f}"
        f"{m.memory['reserved_gib']:>7.1f}{m.tokens_per_second / 1e3:>8.1f}{loss:>9.4f}  {parts}{note}"
        + (f"  then failed: {m.failed}" if m.failed else "")
    )
