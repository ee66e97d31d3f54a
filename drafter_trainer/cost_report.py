"""Time, wire, disk and peak memory of a run: what the plan predicted, and what was measured when the run ended.

A phase of a step that takes more memory than predicted is a defect (`memory.MemoryReport`). Time is assumed from two
sizes on one card, so that here both numbers are said and nothing is called wrong.
"""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from drafter_trainer.memory import MemoryReport
from drafter_trainer.metrics import StepRecord
from slipstream.plan.cost import plan_cost
from slipstream.plan.gpus import assumed_tflops
from slipstream.run_spec.spec import RunSpec
from slipstream.telemetry.logs import log_event

# As in the estimate of the time left: caches, allocator and prefetch are still empty.
_STEPS_NOT_MEASURED = 10
_UNITS = {"step_seconds": ("step_ms", 1e3), "wire_bytes_per_pack": ("pack_mib", 2**-20)}
_UNITS |= {"checkpoint_bytes": ("checkpoint_mib", 2**-20), "peak_bytes": ("peak_mib", 2**-20)}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cost:
    """One number of the plan."""

    predicted: float
    measured: float | None
    """None: there was nothing to measure it on, a run of a few steps or without a checkpoint."""
    difference: float | None
    """Measured above predicted, as a share of predicted."""


class CostReport:
    """Of one process's share of a run."""

    def __init__(self, spec: RunSpec, memory: MemoryReport) -> None:
        """`memory`: of the run; without a plan there, nothing is predicted and nothing said."""
        self._memory = memory
        self._predicted: dict[str, float] = {}
        if memory.sizes is not None:
            tflops = assumed_tflops(memory.sizes, memory.card)
            cost = plan_cost(memory.sizes, tflops=tflops, total_steps=None, keep=spec.checkpoint.keep)
            self._predicted = {
                "step_seconds": cost.step_seconds,
                "wire_bytes_per_pack": cost.wire_bytes_per_pack,
                "checkpoint_bytes": cost.checkpoint_bytes,
            }
        self._steps = 0
        self._seconds = 0.0

    def count(self, record: StepRecord) -> None:
        """Take note of a step: of its time, without waiting for packs and checkpoints, and without measuring."""
        self._steps += 1
        if self._steps > _STEPS_NOT_MEASURED:
            waited = record.data_wait_seconds + record.checkpoint_wait_seconds + record.heldout_seconds
            self._seconds += max(0.0, record.seconds - waited)

    def compared(self, *, pack_bytes: int, checkpoint: Path | None) -> dict[str, Cost]:
        """Every predicted number beside the measured one; empty where nothing is predicted, or no step was trained.

        Args:
            pack_bytes: of a pack as it was read; 0 where none was.
            checkpoint: the newest, if there is one.
        """
        if not self._predicted or not self._steps:
            return {}
        measured_steps = self._steps - _STEPS_NOT_MEASURED
        measured: dict[str, float | None] = {
            "step_seconds": self._seconds / measured_steps if measured_steps > 0 else None,
            "wire_bytes_per_pack": pack_bytes or None,
            "checkpoint_bytes": None if checkpoint is None else _bytes_in(checkpoint),
        }
        costs = {name: _compared(predicted, measured[name]) for name, predicted in self._predicted.items()}
        peak = self._memory.peak()
        return costs if peak is None else costs | {"peak_bytes": _compared(peak.predicted, peak.measured)}


def log_costs(costs: dict[str, Cost]) -> None:
    """One line."""
    words = {
        _UNITS[name][0]: f"{_scaled(name, cost.measured)}/{_scaled(name, cost.predicted)}"
        for name, cost in costs.items()
    }
    log_event(_log, "info", "costs", unit="measured/predicted", **words)


def costs_json(costs: dict[str, Cost]) -> str:
    """For the run directory."""
    return json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=2)


def _bytes_in(directory: Path) -> int | None:
    """None where a newer trainer of the run has removed it meanwhile."""
    try:
        return sum(file.stat().st_size for file in directory.iterdir())
    except OSError:
        return None


def _compared(predicted: float, measured: float | None) -> Cost:
    return Cost(predicted, measured, None if measured is None else round((measured - predicted) / predicted, 4))


def _scaled(name: str, value: float | None) -> str:
    return "?" if value is None else f"{value * _UNITS[name][1]:.4g}"
