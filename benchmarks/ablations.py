"""What is each ingredient of the recipe worth? Short annealed trainings, one change each, measured by decoding.

    python -m benchmarks.ablations --model SmolLM2-135M-Instruct --conversations C.jsonl.gz --prompts P.jsonl \\
        --gpus 0,1 --at-once 4 --work WORK --out OUT --leave-by 560

A variant that changes what a step costs trains alone on a GPU for --seconds, annealed by the clock, beside its target
server. One that does not trains exactly as many steps as the base did in that time; --at-once of them share a GPU, a
target server and, with the same data, every pack, which changes nothing in what they learn. While a group trains, the
next one compiles. Then one evaluator decodes the same prompts with each.

What is finished lies in WORK/results and is not done again: the same command goes on where a cut left it.
"""

import argparse
import gzip
import math
import random
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.ablation_rows import make_rows, markdown
from benchmarks.ablation_variants import BASE, BY_NAME, VARIANTS, Variant
from benchmarks.accepted_length import AcceptedLengths, keep, kept
from benchmarks.gpu_queue import Budget, spread
from benchmarks.results_file import RESULTS, write_results
from benchmarks.served_training import (
    InterruptedTrainingError,
    Place,
    TargetServer,
    TrainerProcess,
    TrainingFailedError,
    checkpoints,
    missing_input,
    target_server,
)
from benchmarks.worker_process import WorkerFailedError
from slipstream.child_processes import sigterm_as_exit

SECONDS = 60.0
START_SECONDS = 100.0
"""Until a group trains, where nothing of it is compiled yet."""
MEASURE_SECONDS = 12.0
SHARED = 0.8
"""Of the time that trainings take one after the other, when they share packs; a guess, to plan with."""
LAST_ONLY = ("checkpoint.every_steps=1000000", "checkpoint.keep=1", "eval.heldout=")

Group = tuple[Variant, ...]
Running = list[tuple[Variant, TrainerProcess]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--prompts-per-source", type=int, default=60)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/smollm2-135m-1gpu.toml"), help="the base")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the base, for every variant"
    )
    parser.add_argument("--only", action="append", default=[], choices=list(BY_NAME), metavar="NAME", help="repeatable")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of training; default: %(default)g")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="variants of the base's cost on one GPU")
    parser.add_argument("--gpus", type=_numbers, default=[0], metavar="N,…")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it with a tiny model")
    parser.add_argument("--leave-by", type=float, help="seconds from now; what does not fit is left for the next call")
    parser.add_argument("--work", type=Path, default=Path("ablations-work"), metavar="DIR")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--commit", help="for machines without the repository")
    args = parser.parse_args()
    if problem := missing_input(args.model, (args.conversations, args.prompts, args.recipe), args.device, args.gpus):
        parser.error(problem)
    with sigterm_as_exit():
        return Ablations(args).run()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


class Ablations:
    """The trainings and measurements of one call."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._budget = Budget(args.leave_by)
        self._left_out: list[str] = []
        self._writing = threading.Lock()
        self._data = args.work / "data"
        self._data.mkdir(parents=True, exist_ok=True)
        self._variants = [BY_NAME[name] for name in args.only] or list(VARIANTS)

    def run(self) -> int:
        """Train, measure, write."""
        try:
            by_clock = [variant for variant in self._variants if variant.steps_of is None and not self._done(variant)]
            spread(self._args.gpus, [(variant,) for variant in by_clock], self._work_on, self._budget)
            by_steps = [variant for variant in self._variants if variant.steps_of and not self._done(variant)]
            size = max(1, self._args.at_once)
            groups = [tuple(by_steps[start : start + size]) for start in range(0, len(by_steps), size)]
            spread(self._args.gpus, groups, self._work_on, self._budget)
        finally:
            text = self._report()
        sys.stdout.write(text)
        return 0

    def _result(self, variant: Variant) -> Path:
        return Path(self._args.work / "results" / f"{variant.name.replace(' ', '-').replace(',', '')}.json")

    def _asked(self, variant: Variant) -> dict[str, Any]:
        asked = asdict(variant) | {"settings": list(variant.settings), "base": self._args.set}
        prompts = [self._args.prompts_per_source, self._args.max_new_tokens]
        return asked | {"seconds": self._args.seconds, "prompts": prompts}

    def _done(self, variant: Variant) -> dict[str, Any] | None:
        found = kept(self._result(variant))
        return found if found is not None and found["asked"] == self._asked(variant) else None

    def _work_on(self, gpu: int, groups: Iterator[Group]) -> None:
        """One group after the other on a GPU; the next one starts while one trains."""
        args = self._args
        first = next(groups, None)
        if first is None:
            return
        place = Place(args.model, args.recipe, args.device, gpu, tuple(args.set), self._budget.stopped)
        home = args.work / f"gpu-{gpu}"
        with ExitStack() as leaving:
            try:
                server = leaving.enter_context(target_server(place, home, self._data))
                lengths = leaving.enter_context(self._evaluator(place, home))
                coming = self._start(first, place, server, leaving)
                while coming is not None:
                    for variant, trainer in self._ready(coming):
                        trainer.begin()
                        _say(f"{variant.name}: trains on GPU {gpu}, {len(coming)} at once")
                    following = self._next(groups, coming, (place, server, leaving))
                    for variant, trainer in coming:
                        self._finish(variant, trainer, lengths, at_once=len(coming))
                    coming = following
            except InterruptedTrainingError:
                return

    def _next(
        self, groups: Iterator[Group], current: Running, where: tuple[Place, TargetServer, ExitStack]
    ) -> Running | None:
        """Start the next group that fits into the time behind the current one."""
        busy = self._seconds_of(current)
        for group in groups:
            if (started := self._start(group, *where, busy=busy)) is not None:
                return started
        return None

    def _seconds_of(self, group: Group | Running) -> float:
        """To train and measure it; several at once share the target's work."""
        share = SHARED if len(group) > 1 else 1.0
        return len(group) * (share * self._args.seconds + MEASURE_SECONDS)

    def _evaluator(self, place: Place, home: Path) -> AcceptedLengths:
        args = self._args
        options = ["--model", args.model, "--prompts", str(args.prompts), "--device", args.device]
        options += ["--prompts-per-source", str(args.prompts_per_source)]
        options += ["--max-new-tokens", str(args.max_new_tokens)]
        options += ["--dtype", "bfloat16" if args.device == "cuda" else "float32"]
        return AcceptedLengths(options, home / "evaluation.log", place.environment, graphs=args.device == "cuda")

    def _start(
        self, group: Group, place: Place, server: TargetServer, leaving: ExitStack, busy: float = 0.0
    ) -> Running | None:
        """Trainers that warm up; None where the group does not fit into the time, or lacks what it is measured by."""
        if not self._budget.allows((busy or START_SECONDS) + self._seconds_of(group)):
            self._left_out += [f"{variant.name}: no time" for variant in group]
            return None
        running = []
        for variant in group:
            settings, seconds = [f'data.files=["{self._conversations(variant.data_share)}"]', *LAST_ONLY], None
            if variant.steps_of is None:
                seconds, steps = self._args.seconds, 1_000_000
            elif (model := self._done(BY_NAME[variant.steps_of])) is None:
                self._left_out.append(f"{variant.name}: trains as many steps as {variant.steps_of}, which is not done")
                continue
            else:
                steps = model["steps"]
            directory = self._args.work / "runs" / self._result(variant).stem
            settings += [f"name=ablation-{VARIANTS.index(variant)}", f"train.max_steps={steps}", *variant.settings]
            running.append(
                (variant, leaving.enter_context(TrainerProcess(place, server, directory, settings, seconds)))
            )
        return running or None

    def _ready(self, running: Running) -> Running:
        """All that have warmed up; the others are left out."""
        for variant, trainer in list(running):
            try:
                trainer.wait_until_ready()
            except TrainingFailedError as error:
                self._left_out.append(f"{variant.name}: {error}")
                running.remove((variant, trainer))
        return running

    def _finish(self, variant: Variant, trainer: TrainerProcess, lengths: AcceptedLengths, *, at_once: int) -> None:
        try:
            trained = trainer.wait()
            seconds, directory = checkpoints(trainer.run_directory)[-1]
            measured = lengths.measure(directory)
        except (TrainingFailedError, WorkerFailedError) as error:
            self._left_out.append(f"{variant.name}: {error}")
            return
        finally:
            trainer.close()
        shutil.rmtree(trainer.run_directory / "checkpoints", ignore_errors=True)
        asked = {"asked": self._asked(variant), "at_once": at_once}
        evaluation = {**measured, **lengths.facts, "loop": lengths.loop}
        keep(self._result(variant), {**asked, **trained, "evaluation": evaluation})
        _say(f"{variant.name}: {trained['steps']} steps in {seconds:.1f} s; measured in {measured['seconds']:.1f} s")
        self._report()

    def _conversations(self, share: float) -> Path:
        """The conversations, or a drawn part of them, below the server's data root."""
        source: Path = self._args.conversations
        if share == 1.0:
            path = self._data / source.name
            if not path.exists():
                shutil.copy2(source, path)
            return path.resolve()
        path = self._data / f"part-{round(1 / share)}-{source.name}"
        if not path.exists():
            opened: Any = gzip.open if source.suffix == ".gz" else open
            with opened(source, "rt", encoding="utf-8") as file:
                lines = file.readlines()
            chosen = sorted(random.Random(0).sample(range(len(lines)), math.ceil(share * len(lines))))
            beside = path.with_name(f".{path.name}")
            with opened(beside, "wt", encoding="utf-8") as file:
                file.writelines(lines[index] for index in chosen)
            beside.replace(path)
        return path.resolve()

    def _report(self) -> str:
        """Write what is finished; returns the table."""
        with self._writing:
            return self._written()

    def _written(self) -> str:
        found = {variant.name: one for variant in VARIANTS if (one := self._done(variant))}
        text = markdown(found)
        if found and BASE in found:
            settings = {key: str(value) for key, value in vars(self._args).items()}
            extra = {"variants": found, "left_out": self._left_out, "settings": settings}
            directory = self._args.out
            path = write_results(
                "ablations", make_rows(found), commit=self._args.commit, extra=extra, directory=directory
            )
            path.with_suffix(".md").write_text(text, encoding="utf-8")
            text += f"{path}\n"
        said = {line.partition(":")[0] for line in self._left_out}
        waiting = [f"{one.name}: not begun" for one in self._variants if one.name not in {*found, *said}]
        return text + "".join(f"left out: {line}\n" for line in [*self._left_out, *waiting])


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
