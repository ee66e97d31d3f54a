"""One side of benchmarks/train_step.py in a process of its own: builds it, then does what each command says.

It obeys benchmarks/worker_process.py.
"""

import argparse
import itertools
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.kernel_parts import profile_steps
from benchmarks.matmul_peak import matmul_peak
from benchmarks.peers.side import Side, SideUnavailableError
from benchmarks.peers.workload import PACKS, SIZES, TINY, Pack, Size, make_pack
from benchmarks.worker_process import answer_all

WARM_UP_STEPS = 4
PROFILED_STEPS = 3
LEAST_STEPS = 8
"""Of random lengths, however little time there is."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only-length", type=int, help="of packs, in place of the size's own")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    size = TINY if args.size == TINY.name else SIZES[args.size]
    if args.only_length is not None:
        size = replace(size, tokens=args.only_length, lengths=(args.only_length,))
    worker = Worker(args.variant, size, torch.device("cuda:0" if args.device == "cuda" else "cpu"))

    def obey(command: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(worker, command.pop("do"))(**command)
        return answer

    return answer_all(worker.build, obey, in_own_words=SideUnavailableError)


class Worker:
    """A side with its packs. Every method answers with what JSON can hold."""

    def __init__(self, variant: str, size: Size, device: torch.device) -> None:
        self._variant, self._size, self._device = variant, size, device
        self._side: Side
        self._packs: list[Pack] = []
        self._done = 0

    def build(self) -> dict[str, Any]:
        """Build, run the first step, warm up."""
        if self._variant == "peak":
            return {"peak_tflops": matmul_peak(self._device), "ready_at": time.time()}
        began = time.time()
        self._side = make_side(self._variant, self._size, self._device)
        split = self._side.split_features
        self._packs = [make_pack(self._size, self._device, number, split_features=split) for number in range(PACKS)]
        built = time.time()
        if self._device.type == "cuda":
            # What building needed for a moment must not count as what training needs.
            torch.cuda.empty_cache()
        self._step()
        losses = [self._side.last_loss()]
        ready_at = time.time()
        for _ in range(WARM_UP_STEPS - 1):
            self._step()
            losses.append(self._side.last_loss())
        return {
            "description": self._side.description,
            "losses": losses,
            "build_seconds": built - began,
            "ready_at": ready_at,
        }

    def time(self, steps: int) -> dict[str, Any]:
        """Milliseconds of each step on the device's clock, gaps included; peak memory of these steps."""
        if self._device.type != "cuda":
            return self._time_on_cpu(steps)
        for _ in range(2):
            self._step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            self._step()
            event.record()
        torch.cuda.synchronize()
        return {
            "milliseconds": [a.elapsed_time(b) for a, b in itertools.pairwise(events)],
            "loss": self._side.last_loss(),
            "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        }

    def _time_on_cpu(self, steps: int) -> dict[str, Any]:
        milliseconds = []
        for _ in range(steps):
            began = time.perf_counter()
            self._step()
            milliseconds.append((time.perf_counter() - began) * 1e3)
        loss = self._side.last_loss()
        return {"milliseconds": milliseconds, "loss": loss, "allocated_gib": 0.0, "reserved_gib": 0.0}

    def profile(self) -> dict[str, Any]:
        """Parts of a step."""
        if self._device.type != "cuda":
            return {"ms_by_part": {}, "kernels_per_step": 0, "top_kernels": []}
        self._step()
        torch.cuda.synchronize()
        return profile_steps(self._step, PROFILED_STEPS)

    def lengths(self, steps: int, seconds: float) -> dict[str, Any]:
        """Steps over packs of every length in random order, as many as fit into `seconds`: graphs compiled meanwhile,
        memory after each step."""
        from drafter_trainer.flex_policy import compiled_graphs

        size, cuda = self._size, self._device.type == "cuda"
        packs = [make_pack(size, self._device, 0, split_features=True, tokens=length) for length in size.lengths]
        draws = random.Random(0)
        order = [draws.randrange(len(packs)) for _ in range(steps)]
        graphs, allocated, reserved = compiled_graphs(), [], []
        milliseconds: dict[int, list[float]] = {length: [] for length in size.lengths}
        end = time.perf_counter() + seconds
        for done, index in enumerate(order):
            began = time.perf_counter()
            if done >= LEAST_STEPS and began > end:
                break
            self._side.step(packs[index])
            loss = self._side.last_loss()
            milliseconds[size.lengths[index]].append((time.perf_counter() - began) * 1e3)
            if cuda:
                allocated.append(torch.cuda.memory_allocated() / 2**30)
                reserved.append(torch.cuda.memory_reserved() / 2**30)
        half = len(allocated) // 2
        return {
            "steps": sum(map(len, milliseconds.values())),
            "loss": loss,
            "graphs_before": graphs,
            "graphs_compiled_meanwhile": compiled_graphs() - graphs,
            "ms_by_length": {length: statistics.median(times) for length, times in milliseconds.items() if times},
            "allocated_growth_gib": max(allocated[half:]) - max(allocated[:half]) if allocated else 0.0,
            "reserved_growth_gib": max(reserved[half:]) - max(reserved[:half]) if reserved else 0.0,
            "reserved_gib": max(reserved, default=0.0),
        }

    def forward_backward(self, tokens: int) -> dict[str, Any]:
        """Peak memory of one pack without an optimizer: what only the optimizer holds is taken off."""
        from benchmarks.peers.ours import OurSide

        assert isinstance(self._side, OurSide)
        pack = make_pack(self._size, self._device, 0, split_features=True, tokens=tokens)
        self._packs = []
        # A whole step gives back what the one before has left, gradients above all.
        self._side.step(pack)
        self._side.last_loss()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._side.forward_backward(pack)
        torch.cuda.synchronize()
        peak, optimizer = torch.cuda.max_memory_allocated(), self._side.optimizer_bytes()
        return {"peak_gb": (peak - optimizer) / 1e9, "with_optimizer_gb": peak / 1e9, "optimizer_gb": optimizer / 1e9}

    def _step(self) -> None:
        self._side.step(self._packs[self._done % len(self._packs)])
        self._done += 1


def make_side(variant: str, size: Size, device: torch.device) -> Side:
    """The side of a name. Imports only what that side needs."""
    return SIDES[variant](size, device)


def _ours(size: Size, device: torch.device) -> Side:
    from benchmarks.peers.ours import OurSide

    return OurSide(size, device)


def _ours_graphs(size: Size, device: torch.device) -> Side:
    from benchmarks.peers.ours import OurSide

    return OurSide(size, device, cuda_graphs=True)


def _ours_kl(size: Size, device: torch.device) -> Side:
    from benchmarks.peers.ours import OurSide

    return OurSide(size, device, cuda_graphs=True, changes={"loss": {"objective": "kl", "slot_weights": "dpace"}})


def _ours_muon(size: Size, device: torch.device) -> Side:
    from benchmarks.peers.ours import OurSide

    return OurSide(size, device, cuda_graphs=True, changes={"optimizer": {"kind": "muon"}})


def _ours_checkpointed(size: Size, device: torch.device) -> Side:
    from benchmarks.peers.ours import OurSide

    return OurSide(size, device, activation_checkpointing=True)


def _ours_checkpointed_1(size: Size, device: torch.device) -> Side:
    from benchmarks.peers.ours import OurSide

    return OurSide(size, device, activation_checkpointing=1)


def _ours_fp8(size: Size, device: torch.device) -> Side:
    from benchmarks.peers.ours import OurSide

    return OurSide(size, device, fp8=True)


def _specforge(size: Size, device: torch.device) -> Side:
    from benchmarks.peers.specforge import SpecForgeSide

    return SpecForgeSide(size, device)


def _specforge_compiled(size: Size, device: torch.device) -> Side:
    from benchmarks.peers.specforge import SpecForgeSide

    return SpecForgeSide(size, device, compiled=True)


def _specforge_shipped(size: Size, device: torch.device) -> Side:
    from benchmarks.peers.specforge import SpecForgeShippedSide

    return SpecForgeShippedSide(size, device)


def _speculators(size: Size, device: torch.device) -> Side:
    from benchmarks.peers.speculators import SpeculatorsSide

    return SpeculatorsSide(size, device)


SIDES: dict[str, Callable[[Size, torch.device], Side]] = {
    "ours": _ours,
    "ours-checkpointed": _ours_checkpointed,
    "ours-checkpointed-1": _ours_checkpointed_1,
    "ours-fp8": _ours_fp8,
    "ours-graphs": _ours_graphs,
    "ours-graphs-kl": _ours_kl,
    "ours-graphs-muon": _ours_muon,
    "specforge": _specforge,
    "specforge-compiled": _specforge_compiled,
    "specforge-shipped": _specforge_shipped,
    "speculators": _speculators,
}

if __name__ == "__main__":
    sys.exit(main())
