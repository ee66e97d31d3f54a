"""How long a run has trained, from its metrics.jsonl."""

import json
from pathlib import Path


def seconds_of_steps(metrics: Path, steps: int) -> float | None:
    """The time of the first `steps` steps, each counted as it was trained last; None without a whole record.

    Steps that were trained again after a crash are counted once.
    """
    if not metrics.is_file():
        return None
    seconds: dict[int, float] = {}
    with metrics.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
                seconds[record["step"]] = record["seconds"]
            except (ValueError, KeyError, TypeError):
                continue  # a line that a crash has torn
    counted = [value for step, value in seconds.items() if step < steps]
    return sum(counted) if len(counted) == steps else None
