"""The one format of every benchmark's result, and where a number came from."""

import json
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf", "numpy")


@dataclass(frozen=True)
class Row:
    """One measured number. `ratio` is turned so that larger is better: `ratio ≥ floor` is the test."""

    case: str
    metric: str
    unit: str
    ours: float
    baseline: float | None = None
    baseline_name: str | None = None
    ratio: float | None = None
    spread: float | None = None
    """(max - min) / median over repetitions; None when measured once."""
    floor: float | None = None
    goal: float | None = None
    interval: tuple[float, float] | None = None
    """95 % interval of the ratio; of `ours` where there is no ratio."""


def spread(values: Sequence[float]) -> float | None:
    """(max - min) / median; None of one value, or where the median is zero."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if len(values) > 1 and middle else None


def write_results(
    name: str,
    rows: list[Row],
    *,
    commit: str | None = None,
    extra: dict[str, Any] | None = None,
    directory: Path = RESULTS,
) -> Path:
    """Write `<directory>/<name>.json`; returns its path.

    Args:
        name: of the benchmark.
        rows: at least one.
        commit: default: what git says; for machines that hold no repository.
        extra: settings and raw numbers that explain the rows.
        directory: default: `benchmarks/results`.
    """
    assert rows, "a benchmark without rows measured nothing"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    content = {
        "benchmark": name,
        "commit": commit or _commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **{p: v for p in _PACKAGES if (v := _version(p))}},
        "rows": [asdict(row) for row in rows],
        **(extra or {}),
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def hardware() -> dict[str, Any]:
    """GPU names and memory, processor, cores."""
    import os

    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": [{"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)} for gpu in gpus],
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    answer = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=RESULTS.parent
    )
    return answer.stdout.strip() or "unknown"
