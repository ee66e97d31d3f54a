"""How a process's memory grows with what it has done: samples from /proc, and a slope with its interval."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCKS = 10
T_95 = 2.306
"""Student's t for a 95 % interval with BLOCKS - 2 degrees of freedom."""


def why_not_here() -> str | None:
    """None where the memory of another process can be read; else the reason, in words."""
    if Path("/proc/self/smaps_rollup").exists():
        return None
    return "this system has no /proc/PID/smaps_rollup (Linux 4.14 and later have): memory of processes is not measured"


def process_memory(pid: int) -> dict[str, float]:
    """MiB of a process that are in memory.

    Returns:
        `resident`: all; `private`: what no file and no other process has, such as the heap; `proportional`: all, where
        a page that n processes share counts 1/n, so that it changes with what else the machine runs.

    Raises:
        OSError: the process has ended, or belongs to somebody else.
    """
    names = {"Rss": "resident", "Anonymous": "private", "Pss": "proportional"}
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name in names:
            found[names[name]] = int(rest.split()[0]) / 1024
    return found


@dataclass(frozen=True)
class Slope:
    """Growth per unit of work, with a 95 % interval."""

    estimate: float
    low: float
    high: float


def fit(work: Sequence[float], values: Sequence[float]) -> Slope:
    """A straight line through the means of BLOCKS consecutive blocks of samples.

    Neighbouring samples of memory are nearly equal, and an interval from each as if it were news would be far too
    narrow; the means of long blocks are nearly independent.

    Args:
        work: what had been done at each sample, ascending; at least two samples a block.
        values: one for each.
    """
    assert len(work) == len(values) >= 2 * BLOCKS, f"{len(work)} samples, {2 * BLOCKS} wanted"
    edges = [round(index * len(work) / BLOCKS) for index in range(BLOCKS + 1)]
    spans = list(itertools.pairwise(edges))
    x = [statistics.fmean(work[begin:end]) for begin, end in spans]
    y = [statistics.fmean(values[begin:end]) for begin, end in spans]
    slope, intercept = statistics.linear_regression(x, y)
    spread = sum((each - statistics.fmean(x)) ** 2 for each in x)
    residual = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    margin = T_95 * math.sqrt(residual / (BLOCKS - 2) / spread)
    return Slope(slope, slope - margin, slope + margin)
