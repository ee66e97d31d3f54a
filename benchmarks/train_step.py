"""Is our training step faster than anything published? Ours and the peers', same work, in one call on one GPU.

    python -m benchmarks.train_step --sizes A,B,C --out DIR --leave-by 540

Every side runs in a process of its own and they take turns: ours, peer, ours, peer. Peers are optional packages
(`pip install --no-deps specforge==0.2.0 speculators==0.9.0`); one that is not there is a row that says so. What each
side runs is in benchmarks/peers, one file each; what is counted as work, in benchmarks/flops.py.

`specforge`, `specforge-compiled` and `speculators` train with our optimizer and our anchors, so that only the step
differs; `specforge-shipped` is its own trainer's step.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import SIZES, TINY
from benchmarks.results_file import RESULTS, write_results
from benchmarks.train_step_rows import Measured, make_rows, table
from benchmarks.worker_process import WorkerFailedError, WorkerProcess
from slipstream.child_processes import one_gpu, sigterm_as_exit

VARIANTS = ("ours", "specforge", "ours-fp8", "ours-graphs", "specforge-shipped", "specforge-compiled", "speculators")
"""In this order by default, so that what matters most is there when time runs out."""
ON_REQUEST = ("ours-graphs-kl", "ours-graphs-muon", "ours-checkpointed", "ours-checkpointed-1")
"""Other work than the peers', or the same in less memory."""
PEERLESS = ("B",)
"""Sizes with several pack lengths in one run, for which peers have no counterpart."""
ROUNDS = 3
BUILD_SECONDS = 500.0
ANSWER_SECONDS = 600.0
LEAST_SECONDS = 30.0
"""With less time than this, nothing new is begun."""
MEMORY_TOKENS = 4000
LENGTH_STEPS = 200
END_SECONDS = 10.0
"""Of the time given: to end a worker, and for what was measured to be written."""


def main() -> int:
    began = time.monotonic()  # `--leave-by` counts from here: to import torch takes ten seconds on some machines
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=_names((*SIZES, TINY.name)), default=["A", "B", "C"], metavar=",".join(SIZES))
    parser.add_argument("--variants", type=_names((*VARIANTS, *ON_REQUEST)), default=list(VARIANTS), metavar="NAMES")
    parser.add_argument("--steps", type=int, default=24, help="timed steps of every side, in all rounds together")
    parser.add_argument("--leave-by", type=float, default=3600.0, help="seconds from now; what is left out is said")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it, with --sizes tiny")
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="build all sides of a size at a time: needs the memory of all, saves time",
    )
    parser.add_argument(
        "--memory-only",
        action="store_true",
        help=f"of our variants: what a pack of {MEMORY_TOKENS} tokens needs, the one length declared; nothing is timed",
    )
    parser.add_argument("--commit", help="for machines without the repository")
    args = parser.parse_args()
    if problem := _problem(args):
        parser.error(problem)
    args.out.mkdir(parents=True, exist_ok=True)
    with sigterm_as_exit():
        benchmark = Benchmark(args, began + args.leave_by - END_SECONDS)
        try:
            benchmark.run()
        finally:
            # Also when it is told to stop: what was measured is kept.
            text = benchmark.write()
    sys.stdout.write(text)
    return 0


def _names(known: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def _problem(args: argparse.Namespace) -> str | None:
    if args.device == "cpu":
        if args.memory_only:
            return "--memory-only needs a GPU: a CPU's allocator is not asked"
        return None if args.sizes == [TINY.name] else "a CPU runs --sizes tiny only"
    import torch

    if not torch.cuda.is_available():
        return "torch finds no GPU; try --device cpu --sizes tiny"
    return None


class Seat:
    """A worker and what is known of it. After its first failure it is asked nothing more."""

    def __init__(self, worker: WorkerProcess, measured: Measured, deadline: float) -> None:
        self.measured = measured
        self._worker = worker
        self._deadline = deadline

    def wait_until_built(self) -> None:
        """Hear that its first step is done, and when."""
        build = self._heard(lambda: self._worker.answer(self._patience(BUILD_SECONDS)))
        if build:
            self.measured.build = build
            build["first_step_seconds"] = seconds = build["ready_at"] - self._worker.started_at
            what = f"{self.measured.size} {self.measured.variant}"
            sys.stderr.write(f"{what}: first step {seconds:.1f} s after its start\n")

    @property
    def seconds_left(self) -> float:
        """Until the time is over."""
        return max(0.0, self._deadline - time.monotonic())

    def ask(self, do: str, **options: Any) -> dict[str, Any] | None:
        """Its answer; None if it failed, now or before."""
        return self._heard(lambda: self._worker.ask(self._patience(ANSWER_SECONDS), do=do, **options))

    def time(self, steps: int) -> float | None:
        """Median milliseconds of some steps, which are kept."""
        answer = self.ask("time", steps=steps)
        if answer is None:
            return None
        self.measured.milliseconds += answer.pop("milliseconds")
        self.measured.memory = answer
        return statistics.median(self.measured.milliseconds[-steps:])

    def _heard(self, hear: Any) -> dict[str, Any] | None:
        if self.measured.failed is not None:
            return None
        try:
            answer: dict[str, Any] = hear()
        except WorkerFailedError as error:
            self.measured.failed = str(error)
            return None
        return answer

    def _patience(self, most: float) -> float:
        return min(most, self._deadline - time.monotonic())


class Benchmark:
    """The measurements of one call."""

    def __init__(self, args: argparse.Namespace, deadline: float) -> None:
        """`deadline`: on time.monotonic(); what runs then is ended."""
        self._args = args
        self._deadline = deadline
        self._measured: list[Measured] = []
        self._peaks: list[float] = []

    def run(self) -> None:
        """Everything that was asked for, as far as the time allows."""
        if self._args.memory_only:
            for size in self._args.sizes:
                self._measure_memory(size)
            return
        self._measure_peak()
        for size in self._args.sizes:
            self._measure_size(size)
            if size == "C" and self._args.device == "cuda":
                self._measure_first_steps(size)
        self._measure_peak()

    def write(self) -> str:
        """Write the JSON; returns the table."""
        peak = statistics.median(self._peaks) if self._peaks else None
        rows = make_rows(self._measured, peak)
        extra = {
            "peak_tflops": self._peaks,
            "sides": [measured.as_json(peak) for measured in self._measured],
            "settings": {key: str(value) for key, value in vars(self._args).items()},
        }
        # A name for each choice of sizes: another call does not overwrite what this one has measured.
        name = "_".join(("train_step", *self._args.sizes, *(["memory"] if self._args.memory_only else [])))
        path = write_results(name, rows, commit=self._args.commit, extra=extra, directory=self._args.out)
        return f"{table(self._measured, rows, peak)}\n{path}\n"

    @contextmanager
    def _seat(self, measured: Measured, environment: dict[str, str] | None = None) -> Iterator[Seat | None]:
        """A worker for a side, whose results go into `measured`; None where there is no time left for it."""
        if self._deadline - time.monotonic() < LEAST_SECONDS:
            measured.failed = "left out: no time"
            yield None
            return
        options = ["--variant", measured.variant, "--size", measured.size, "--device", self._args.device]
        options += ["--only-length", str(MEMORY_TOKENS)] if self._args.memory_only else []
        log = self._args.out / f"train_step-{measured.size}-{measured.variant}.log"
        visible = one_gpu() if self._args.device == "cuda" else {}
        with WorkerProcess(
            ["benchmarks.train_step_worker", *options], log, {**visible, **(environment or {})}
        ) as worker:
            yield Seat(worker, measured, self._deadline)
        if measured.failed:
            sys.stderr.write(f"{measured.size} {measured.variant}: failed: {measured.failed}\n")

    def _noted(self, size: str, variant: str) -> Measured:
        self._measured.append(Measured(size, variant))
        return self._measured[-1]

    def _measure_size(self, size: str) -> None:
        # A step that computes for longer than its launches take has nothing to gain from a graph.
        skipped = ("ours",) if size.startswith("C") else ("ours", "ours-graphs")
        others = [variant for variant in self._args.variants if variant not in skipped and size not in PEERLESS]
        with self._seat(self._noted(size, "ours")) as ours, ExitStack() as early:
            if ours is None:
                return
            names = others if self._args.at_once else []
            company = [early.enter_context(self._seat(self._noted(size, name))) for name in names]
            ours.wait_until_built()
            for other in filter(None, company):
                other.wait_until_built()
            for other in filter(None, company):
                self._measure_pair(ours, other)
            for name in [] if names else others:
                with self._seat(self._noted(size, name)) as late:
                    if late is not None:
                        late.wait_until_built()
                        self._measure_pair(ours, late)
            self._measure_alone(ours, has_company=bool(others))

    def _measure_memory(self, size: str) -> None:
        """One side at a time: each has the device for itself."""
        for variant in (name for name in self._args.variants if name.startswith("ours")):
            with self._seat(self._noted(size, variant)) as seat:
                if seat is not None:
                    seat.wait_until_built()
                    seat.measured.forward_backward = seat.ask("forward_backward", tokens=MEMORY_TOKENS) or {}

    def _measure_alone(self, ours: Seat, *, has_company: bool) -> None:
        if not has_company:
            ours.time(self._args.steps)
        ours.measured.profile = ours.ask("profile") or {}
        if ours.measured.size in PEERLESS:
            ours.measured.forward_backward = ours.ask("forward_backward", tokens=MEMORY_TOKENS) or {}
            ours.measured.lengths = ours.ask("lengths", steps=LENGTH_STEPS, seconds=ours.seconds_left * 0.8) or {}

    def _measure_pair(self, ours: Seat, other: Seat) -> None:
        steps = -(-self._args.steps // ROUNDS)
        for _ in range(ROUNDS):
            mine, theirs = ours.time(steps), other.time(steps)
            if mine and theirs:
                other.measured.ratios.append(theirs / mine)
        other.measured.profile = other.ask("profile") or {}

    def _measure_first_steps(self, size: str) -> None:
        """From exec to the first step: with an empty compile cache, then with what that left."""
        with tempfile.TemporaryDirectory(prefix="train-step-cache-") as cache:
            environment = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
            for name in ("cold", "warm"):
                measured = self._noted(size, "ours")
                with self._seat(measured, environment) as seat:
                    if seat is not None:
                        seat.wait_until_built()
                    measured.first_step_seconds = measured.build.get("first_step_seconds")
                measured.variant = f"ours, {name} cache"

    def _measure_peak(self) -> None:
        if self._args.device != "cuda":
            return
        measured = Measured("A", "peak")
        with self._seat(measured) as seat:
            if seat is not None:
                seat.wait_until_built()
            if measured.build:
                self._peaks.append(measured.build["peak_tflops"])


if __name__ == "__main__":
    sys.exit(main())
