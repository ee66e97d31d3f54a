"""Memory of the device, measured by phase during the warm-up and laid beside what the plan predicts.

The numbers are the allocator's own, kept on the host: reading them waits for nothing, and outside the warm-up nothing
is read. What the plan does not explain is a defect of the plan or of the step, and is said. On a CPU there are no
phases: the peak is the process's, and a run that cannot fit is refused, for the system would end it without a word.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import SlipstreamError
from slipstream.machine_probe import memory_bytes, peak_resident_bytes
from slipstream.plan.gpus import Gpu, this_cpu, this_gpu
from slipstream.plan.memory import MEASUREMENT, OUTSIDE_ALLOCATOR, MemoryPlan, expected_in_warm_up, plan_memory
from slipstream.plan.refusal import in_words, refusal
from slipstream.plan.report import sizes_of_run
from slipstream.plan.search import nearest_fit
from slipstream.plan.sizes import RunSizes
from slipstream.plan.target_sizes import sizes_of_served
from slipstream.run_spec.architectures import DFLASH
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from slipstream.telemetry.logs import log_event
from slipstream.wire.target_config import TargetConfig

UNEXPLAINED_SHARE = 0.10
_UNEXPLAINED_BYTES = 64 << 20
"""Less than this is rounding, whatever share of a small drafter it is."""

_log = logging.getLogger(__name__)


class MemoryMeter:
    """What the allocator held at its worst moment of each phase of a step. Silent but on CUDA, and after `close`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_open = device.type == "cuda"
        self._peaks: dict[tuple[str, int], int] = {}
        self.largest_reserved = 0
        """Most that the allocator had of the device at once."""

    def begin(self) -> None:
        """What comes now belongs to the phase that ends next."""
        if self._is_open:
            self._note_reserved()
            torch.cuda.reset_peak_memory_stats(self._device)

    def ended(self, phase: str, tokens: int = 0) -> None:
        """A phase of a step on a pack of so many tokens has ended; the next one begins."""
        if self._is_open:
            peak = torch.cuda.max_memory_allocated(self._device)
            # The first run of a shape compiles and tries kernels, which takes memory that no later one needs.
            self._peaks[phase, tokens] = min(peak, self._peaks.get((phase, tokens), peak))
            self.begin()

    def close(self) -> None:
        """Measure no more."""
        if self._is_open:
            self._note_reserved()
        self._is_open = False

    def peaks(self) -> dict[str, int]:
        """Bytes by phase, of the longest pack."""
        found: dict[str, int] = {}
        for (phase, _), peak in self._peaks.items():
            found[phase] = max(peak, found.get(phase, 0))
        return found

    def _note_reserved(self) -> None:
        self.largest_reserved = max(self.largest_reserved, torch.cuda.max_memory_reserved(self._device))


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes of one phase."""

    phase: str
    predicted: int
    measured: int
    is_bound: bool = False
    """What is predicted is the most: less is no defect."""

    @property
    def difference(self) -> float:
        """Measured above predicted, as a share of predicted."""
        return (self.measured - self.predicted) / self.predicted

    @property
    def is_explained(self) -> bool:
        """Whether the plan comes near enough."""
        off = self.measured - self.predicted
        if self.is_bound and off < 0:
            return True
        return abs(off) <= max(UNEXPLAINED_SHARE * self.predicted, _UNEXPLAINED_BYTES)


class MemoryReport:
    """Predicted and measured memory of one run; measured only, where the plan does not know the architecture."""

    def __init__(self, spec: RunSpec, target: TargetConfig, device: torch.device) -> None:
        """Plan the run.

        Raises:
            SlipstreamError: as `sizes_of`.
        """
        self._device = device
        self.card = _card_of(device)
        self.sizes = sizes_of(spec, target) if spec.drafter.architecture == DFLASH else None
        """None where the plan does not know the architecture."""
        self._measured: dict[str, int] = {}
        self._reserved = 0
        self._plan = plan_memory(self.sizes, self.card.memory_bytes) if self.sizes else None
        self._expected = expected_in_warm_up(self.sizes, self._plan) if self.sizes and self._plan else {}

    def require_room(self) -> None:
        """Refuse what this machine's memory cannot hold, where a CPU trains. A GPU says so itself, and does no harm.

        Raises:
            SlipstreamError: OUT_OF_MEMORY, in the words of `slipstream plan`.
        """
        if self._device.type == "cuda" or self.sizes is None or self._plan is None:
            return
        if (why := refusal(self.sizes, self.card)) is not None:
            raise why
        available = memory_bytes()[1]
        if self._plan.peak_bytes > available:
            short = {"predicted_mib": _mib(self._plan.peak_bytes), "available_mib": _mib(available)}
            log_event(_log, "warning", "memory_short", **short, then="the system may end this process")

    def note(self, phase: str) -> None:
        """Something that stays was made: `phase` says what."""
        if self._device.type == "cuda":
            self._measured[phase] = torch.cuda.memory_allocated(self._device)

    def take(self, meter: MemoryMeter) -> None:
        """The warm-up has ended."""
        meter.close()
        self._measured |= meter.peaks()
        self._reserved = meter.largest_reserved

    def peak(self) -> PhaseMemory | None:
        """Of the whole process until now: on a GPU what its allocator had, on a CPU what was resident."""
        if self._plan is None:
            return None
        if self._device.type == "cuda":
            reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))
            return PhaseMemory("peak", self._plan.peak_bytes - OUTSIDE_ALLOCATOR, reserved)
        return PhaseMemory("peak", self._plan.peak_bytes, peak_resident_bytes())

    def phases(self) -> list[PhaseMemory]:
        """In the order in which they come; those that were measured."""
        return [
            PhaseMemory(phase, predicted, self._measured[phase], is_bound=phase == MEASUREMENT)
            for phase, predicted in self._expected.items()
            if phase in self._measured
        ]

    def log(self) -> None:
        """One line, and one more for every phase that the plan does not explain. Nothing on a CPU."""
        if not self._measured:
            return
        words = {
            phase.replace(" ", "_"): f"{_mib(size)}/{_mib(self._expected[phase]) if phase in self._expected else '?'}"
            for phase, size in self._measured.items()
        }
        log_event(_log, "info", "memory", unit="MiB measured/predicted", **words, reserved=_mib(self._reserved))
        for phase in self.phases():
            if not phase.is_explained:
                log_event(
                    _log,
                    "warning",
                    "memory_unexplained",
                    phase=phase.phase,
                    predicted_mib=_mib(phase.predicted),
                    measured_mib=_mib(phase.measured),
                    difference=f"{phase.difference:+.0%}",
                    defect="the plan's formulas or the step are wrong by more than 10 %; training goes on",
                )

    def to_json(self) -> str:
        """For the run directory."""
        return json.dumps(
            {
                "device": self.card.name,
                "device_bytes": self.card.memory_bytes,
                "phases": [
                    {
                        "phase": phase.phase,
                        "predicted_bytes": phase.predicted,
                        "measured_bytes": phase.measured,
                        "difference": round(phase.difference, 4),
                        "explained": phase.is_explained,
                    }
                    for phase in self.phases()
                ],
                "reserved_bytes": self._reserved,
                **_predictions(self._plan),
            },
            indent=2,
        )

    @contextmanager
    def shortage_explained(self) -> Iterator[None]:
        """Add to an OUT_OF_MEMORY what was predicted, what was measured, and the nearest settings that fit."""
        try:
            yield
        except SlipstreamError as error:
            if error.reason is not Reason.OUT_OF_MEMORY or self._plan is None:
                raise
            if self._device.type == "cuda":
                free, total = torch.cuda.mem_get_info(self._device)
                reserved = torch.cuda.memory_reserved(self._device)
                words, limit = self.shortage_in_words(free, reserved), free + reserved + OUTSIDE_ALLOCATOR
            else:
                total, free = memory_bytes()
                words, limit = self.shortage_of_host_in_words(free, peak_resident_bytes()), total
            raise SlipstreamError(
                f"{error.message} {words}",
                reason=Reason.OUT_OF_MEMORY,
                remedy=f"{self.way_out(limit, total)} {error.remedy}",
            ) from error

    def shortage_in_words(self, free: int, reserved: int) -> str:
        """`free`: of the card; `reserved`: by this process's allocator."""
        assert self._plan is not None
        worst = self._plan.worst_phase
        measured = ", ".join(f"{phase.phase} {_mib(phase.measured)} MiB" for phase in self.phases()) or "nothing yet"
        others = max(0, self.card.memory_bytes - free - reserved - OUTSIDE_ALLOCATOR)
        return (
            f"Predicted: at most {_mib(self._plan.peak_bytes)} MiB, in the {worst}. Measured: {measured}; now "
            f"{_mib(reserved)} MiB reserved, {_mib(free)} free, about {_mib(others)} of other programs."
        )

    def shortage_of_host_in_words(self, available: int, peak: int) -> str:
        """`available`: of the machine's memory; `peak`: that this process has had."""
        assert self._plan is not None
        return (
            f"Predicted: at most {_mib(self._plan.peak_bytes)} MiB, in the {self._plan.worst_phase}. Measured: this "
            f"process had {_mib(peak)} MiB at most, of {_mib(self.card.memory_bytes)}; now {_mib(available)} are free."
        )

    def way_out(self, limit: int, total: int) -> str:
        """The nearest settings that fit into `limit` bytes of a device of `total`."""
        assert self._plan is not None and self.sizes is not None
        # What was predicted to fit and did not must become smaller all the same.
        limit = min(limit, round((1 - UNEXPLAINED_SHARE) * self._plan.peak_bytes))
        fit = nearest_fit(self.sizes, limit, total)
        if fit is None:
            return f"No setting that slipstream plan tries fits into {_mib(limit)} MiB."
        return f"Nearest settings that fit into {_mib(limit)} MiB: {in_words(fit)}."


def _card_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return this_cpu()
    properties = torch.cuda.get_device_properties(device)
    return this_gpu(properties.name, properties.total_memory, (properties.major, properties.minor))


def _predictions(plan: MemoryPlan | None) -> dict[str, Any]:
    if plan is None:
        return {}
    parts = {
        "held": dict(plan.held),
        "phases": {phase: dict(parts) for phase, parts in plan.phases.items()},
        "outside": dict(plan.outside),
    }
    return {"predicted_parts": parts, "predicted_peak_bytes": plan.peak_bytes}


def sizes_of(spec: RunSpec, target: TargetConfig) -> RunSizes:
    """Those of `slipstream plan`, of a run whose target server says this of its model.

    Raises:
        SlipstreamError: DATA_INVALID, TARGET_FINGERPRINT_MISMATCH, held-out answers of no use.
    """
    return sizes_of_run(spec, sizes_of_served(target))[0]


def _mib(size: int) -> int:
    return round(size / (1 << 20))
