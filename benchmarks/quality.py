"""Is a drafter trained by Slipstream accepted longer than the peer's after the same time? The headline.

    python -m benchmarks.quality --model SmolLM2-135M-Instruct --conversations C.jsonl.gz --prompts P.jsonl \\
        --gpus 0,1 --work WORK --out OUT --leave-by 560

Ours: target server and trainer, two processes on one GPU. The peer: SpecForge 0.2.0's DFlash with the target in its own
process (benchmarks/peers/specforge_run.py says what is its and what is done for it). Each trains alone on a GPU, with a
schedule that the clock anneals to exactly --train-seconds after its warm-up; then one evaluator decodes the same
prompts with both. One more training of ours has a third of the time.

--tune tries learning rates (and for the peer two batch sizes) for --tune-seconds each, on the very prompts that are
then reported, and keeps what is best; without it each side has its recipe's settings. What is finished lies in WORK and
is not done again: the same command goes on where a cut left it.
"""

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.accepted_length import AcceptedLengths, keep, kept
from benchmarks.gpu_queue import Budget, spread
from benchmarks.peers.specforge_process import PEER_DEFAULTS, run_peer
from benchmarks.quality_rows import best_try, make_rows, table
from benchmarks.results_file import RESULTS, write_results
from benchmarks.served_training import (
    InterruptedTrainingError,
    Place,
    TrainerProcess,
    TrainingFailedError,
    checkpoints,
    missing_input,
    target_server,
)
from benchmarks.worker_process import WorkerFailedError
from slipstream.child_processes import sigterm_as_exit
from slipstream.eval_prompts import load_prompts

TRAIN_SECONDS, TUNE_SECONDS = 210.0, 60.0
START_SECONDS = {"ours": 120.0, "peer": 70.0}
"""Until the clock starts, on a machine that has compiled nothing yet."""
MEASURE_SECONDS = 45.0
"""A drafter's evaluation, the evaluator's start included."""
CURVE = (1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6)
"""Of the time, where our checkpoints are measured too."""
OUR_TRIES = tuple((f"optimizer.learning_rate={rate}",) for rate in ("6e-4", "1e-3", "2e-3"))
PEER_TRIES = tuple((f"batch={size}", f"learning_rate={rate}") for size in (4, 16) for rate in ("6e-4", "1e-3", "2e-3"))
ENDLESS = ("train.max_steps=1000000", "checkpoint.every_steps=250", "checkpoint.keep=1000", "eval.heldout=")


@dataclass(frozen=True)
class Training:
    """One training of one side."""

    name: str
    side: str
    seconds: float
    settings: tuple[str, ...]
    conversations: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--more-conversations", type=Path, help="a further row of ours: trained on these instead")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--prompts-per-source", type=int, default=60)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/smollm2-135m-1gpu.toml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of our recipe")
    parser.add_argument("--peer", action="append", default=[], metavar="KEY=VALUE", help="of the peer's settings")
    parser.add_argument("--train-seconds", type=float, default=TRAIN_SECONDS)
    parser.add_argument("--tune", action="store_true", help="tries only; a later call without it uses the best")
    parser.add_argument("--tune-seconds", type=float, default=TUNE_SECONDS)
    parser.add_argument("--gpus", type=_numbers, default=[0], metavar="N,…")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it with a tiny model")
    parser.add_argument("--leave-by", type=float, help="seconds from now; what does not fit is left for the next call")
    parser.add_argument("--work", type=Path, default=Path("quality-work"), metavar="DIR")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--commit", help="for machines without the repository")
    args = parser.parse_args()
    if problem := _problem(args):
        parser.error(problem)
    with sigterm_as_exit():
        return Quality(args).run()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _problem(args: argparse.Namespace) -> str | None:
    """What is missing, found in the first seconds."""
    files = (args.conversations, args.more_conversations, args.prompts, args.recipe)
    if importlib.util.find_spec("specforge") is None:
        return "the peer is not installed: pip install --no-deps specforge==0.2.0"
    if problem := missing_input(args.model, files, args.device, args.gpus):
        return problem
    counts: dict[str, int] = {}
    for prompt in load_prompts(args.prompts, args.prompts_per_source):
        counts[prompt.source] = counts.get(prompt.source, 0) + 1
    short = [source for source, count in counts.items() if count < args.prompts_per_source]
    return f"{args.prompts} has only {counts[short[0]]} prompts of {short[0]}" if short else None


class Quality:
    """The trainings and measurements of one call."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._budget = Budget(args.leave_by)
        self._left_out: list[str] = []
        self._data = args.work / "data"
        self._data.mkdir(parents=True, exist_ok=True)
        for path in filter(None, (args.conversations, args.more_conversations)):
            # The server reads files below one directory only.
            shutil.copy2(path, self._data / path.name)

    def run(self) -> int:
        """Train, measure, write."""
        trainings = self._tries() if self._args.tune else self._finals()
        try:
            spread(self._args.gpus, trainings, self._train_all, self._budget)
            spread(self._args.gpus, list(self._to_measure(trainings)), self._measure_all, self._budget)
        finally:
            text = self._report(trainings)
        sys.stdout.write(text)
        return 0

    def _tries(self) -> list[Training]:
        pairs = [("ours", (*self._args.set, *each)) for each in OUR_TRIES] + [("peer", each) for each in PEER_TRIES]
        return [
            Training(f"try-{side}-{index}", side, self._args.tune_seconds, each, self._file(self._args.conversations))
            for index, (side, each) in enumerate(pairs)
        ]

    def _finals(self) -> list[Training]:
        seconds, data = self._args.train_seconds, self._file(self._args.conversations)
        ours = tuple(best_try(self._args.work, "ours") or self._args.set)
        peer = tuple(self._args.peer or best_try(self._args.work, "peer") or PEER_DEFAULTS)
        finals = [Training("ours", "ours", seconds, ours, data), Training("peer", "peer", seconds, peer, data)]
        finals.append(Training("ours-third", "ours", seconds / 3, ours, data))
        if self._args.more_conversations:
            more = self._file(self._args.more_conversations)
            finals.append(Training("ours-more-data", "ours", seconds, ours, more))
        return finals

    def _file(self, path: Path) -> str:
        return str((self._data / path.name).resolve())

    def _done(self, training: Training) -> dict[str, Any] | None:
        """Of a finished training with exactly these settings."""
        found = kept(self._args.work / "trainings" / f"{training.name}.json")
        same = found is not None and found["asked"] == {**asdict(training), "settings": list(training.settings)}
        return found if same else None

    def _train_all(self, gpu: int, trainings: Iterator[Training]) -> None:
        place = Place(
            self._args.model, self._args.recipe, self._args.device, gpu, tuple(self._args.set), self._budget.stopped
        )
        for training in trainings:
            if self._done(training):
                continue
            if not self._budget.allows(training.seconds + START_SECONDS[training.side] + MEASURE_SECONDS):
                self._left_out.append(f"{training.name}: no time to train")
                continue
            _say(f"{training.name}: begins on GPU {gpu}: {', '.join(training.settings) or 'as the recipe says'}")
            try:
                found = self._trained(training, place)
            except InterruptedTrainingError:
                return
            except TrainingFailedError as error:
                self._left_out.append(f"{training.name}: {error}")
                continue
            keep(self._args.work / "trainings" / f"{training.name}.json", {"asked": asdict(training), **found})
            # Measured with other weights, if at all.
            for old in (self._args.work / "lengths").glob(f"{training.name}@*.json"):
                old.unlink()
            speed, steps = found["tokens_per_second"], found["steps"]
            _say(f"{training.name}: {steps} steps in {found['seconds']:.1f} s, {speed:,.0f} tokens/s")

    def _trained(self, training: Training, place: Place) -> dict[str, Any]:
        directory = self._args.work / training.name
        if training.side == "peer":
            return run_peer(place, directory, Path(training.conversations), training.seconds, training.settings)
        files = f'data.files=["{training.conversations}"]'
        with (
            target_server(place, directory.with_name(f"{training.name}-server"), self._data) as server,
            TrainerProcess(
                place, server, directory, (files, *ENDLESS, *training.settings), training.seconds
            ) as trainer,
        ):
            trainer.wait_until_ready()
            trainer.begin()
            found = trainer.wait()
        saved = checkpoints(trainer.run_directory)
        return {**found, "drafters": [[seconds, str(path.resolve())] for seconds, path in saved]}

    def _to_measure(self, trainings: list[Training]) -> Iterator[tuple[str, Path]]:
        """Name and directory of every drafter that is not measured yet; the ends first, then the way there."""
        done = [(training, found) for training in trainings if (found := self._done(training))]
        wanted = [(f"{training.name}@end", Path(found["drafters"][-1][1])) for training, found in done]
        for training, found in done:
            if training.name == "ours":
                wanted += [
                    (f"ours@{seconds:.0f}s", Path(path)) for seconds, path in on_the_way(found["drafters"], CURVE)
                ]
        return ((name, path) for name, path in wanted if self._length(name) is None)

    def _length_file(self, name: str) -> Path:
        return Path(self._args.work / "lengths" / f"{name}.json")

    @property
    def _prompts(self) -> list[Any]:
        return [self._args.prompts.name, self._args.prompts_per_source, self._args.max_new_tokens]

    def _length(self, name: str) -> dict[str, Any] | None:
        """Of a drafter that was measured with these prompts."""
        found = kept(self._length_file(name))
        return found if found is not None and found["prompts"] == self._prompts else None

    def _measure_all(self, gpu: int, drafters: Iterator[tuple[str, Path]]) -> None:
        args = self._args
        place = Place(args.model, args.recipe, args.device, gpu)
        options = ["--model", args.model, "--prompts", str(args.prompts), "--device", args.device]
        options += ["--prompts-per-source", str(args.prompts_per_source)]
        options += ["--max-new-tokens", str(args.max_new_tokens)]
        options += ["--dtype", "bfloat16" if args.device == "cuda" else "float32"]
        first = next(drafters, None) if self._budget.allows(MEASURE_SECONDS) else None
        if first is None:
            return
        log = args.work / f"evaluation-{gpu}.log"
        with AcceptedLengths(options, log, place.environment, graphs=args.device == "cuda") as lengths:
            for name, directory in _chained(first, drafters):
                if not self._budget.allows(MEASURE_SECONDS / 2):
                    self._left_out.append(f"{name}: no time to measure")
                    continue
                try:
                    answer = lengths.measure(directory)
                except WorkerFailedError as error:
                    self._left_out.append(f"{name}: {error}")
                    continue
                keep(
                    self._length_file(name), {**answer, **lengths.facts, "loop": lengths.loop, "prompts": self._prompts}
                )
                _say(f"{name}: measured in {answer['seconds']:.1f} s, {lengths.loop}")

    def _report(self, trainings: list[Training]) -> str:
        trained = {training.name: found for training in trainings if (found := self._done(training))}
        names = [path.stem for path in sorted((self._args.work / "lengths").glob("*.json"))]
        lengths = {name: found for name in names
                   if name.partition("@")[0] in trained and (found := self._length(name))}  # fmt: skip
        rows = make_rows(trained, lengths)
        said = {line.partition(":")[0] for line in self._left_out}
        self._left_out += [f"{one.name}: not begun" for one in trainings if one.name not in {*trained, *said}]
        self._left_out += [f"{name}@end: not measured" for name in trained if f"{name}@end" not in {*lengths, *said}]
        text = table(trained, lengths, rows, self._left_out)
        if rows and not self._args.tune:
            settings = {key: str(value) for key, value in vars(self._args).items()}
            extra = {"trainings": trained, "lengths": lengths, "left_out": self._left_out, "settings": settings}
            path = write_results("quality", rows, commit=self._args.commit, extra=extra, directory=self._args.out)
            text += f"{path}\n"
        return text


def on_the_way(drafters: list[list[Any]], shares: tuple[float, ...]) -> list[tuple[float, str]]:
    """Seconds and directory of the checkpoints that lie nearest to these shares of the time, without the last."""
    seconds = drafters[-1][0]
    nearest = {min(range(len(drafters)), key=lambda index: abs(drafters[index][0] - share * seconds))
               for share in shares}  # fmt: skip
    return [(drafters[index][0], drafters[index][1]) for index in sorted(nearest) if index < len(drafters) - 1]


def _chained(first: tuple[str, Path], rest: Iterator[tuple[str, Path]]) -> Iterator[tuple[str, Path]]:
    yield first
    yield from rest


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
