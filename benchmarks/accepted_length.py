"""Accepted lengths of drafters over the same prompts: measured by a worker process, compared with paired intervals."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.worker_process import WorkerFailedError, WorkerProcess

ALL = "all"
"""Stands for the prompts of all sources together."""
RESAMPLES = 4000
SEED = 0
LOAD_SECONDS = 300.0
MEASURE_SECONDS = 300.0

Interval = tuple[float, float]


@dataclass(frozen=True)
class Measured:
    """One drafter's decodings of the shared prompts."""

    tokens: dict[str, list[int]]
    """By source: new tokens of each prompt, the prefill's left out."""
    rounds: dict[str, list[int]]
    """By source: verification rounds of each prompt."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "Measured":
        """From the worker's answer, or from what was kept of it."""
        return cls(dict(answer["tokens"]), dict(answer["rounds"]))

    @property
    def sources(self) -> list[str]:
        """Sources, and all of them together."""
        return [*self.tokens, ALL]

    def table(self, source: str) -> npt.NDArray[np.float64]:
        """[prompts, 2]: tokens and rounds."""
        names = list(self.tokens) if source == ALL else [source]
        pairs = [pair for name in names for pair in zip(self.tokens[name], self.rounds[name], strict=True)]
        return np.array(pairs, dtype=float).reshape(-1, 2)

    def accepted_length(self, source: str) -> float:
        """Mean tokens per round, bonus included."""
        tokens, rounds = self.table(source).sum(axis=0)
        return float(tokens / rounds)


def interval(measured: Measured, source: str) -> Interval:
    """95 % interval of the accepted length, over prompts."""
    return _middle(_lengths(measured.table(source), _draws(len(measured.table(source)))))


def ratio_interval(ours: Measured, theirs: Measured, source: str) -> Interval:
    """95 % interval of ours ÷ theirs; both decodings of a prompt are drawn together."""
    a, b = ours.table(source), theirs.table(source)
    drawn = _draws(len(a))
    return _middle(_lengths(a, drawn) / _lengths(b, drawn))


def difference_interval(ours: Measured, theirs: Measured, source: str) -> Interval:
    """95 % interval of ours − theirs; both decodings of a prompt are drawn together."""
    a, b = ours.table(source), theirs.table(source)
    drawn = _draws(len(a))
    return _middle(_lengths(a, drawn) - _lengths(b, drawn))


def _draws(prompts: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(SEED).integers(prompts, size=(RESAMPLES, prompts))


def _lengths(table: npt.NDArray[np.float64], drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    tokens, rounds = table[drawn].sum(axis=1).T
    lengths: npt.NDArray[np.float64] = tokens / rounds
    return lengths


def _middle(values: npt.NDArray[np.float64]) -> Interval:
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


class AcceptedLengths:
    """The worker on one GPU. Use as a context manager.

    Where a round cannot be captured as a CUDA graph, a new worker launches kernel by kernel, and `loop` says so.
    """

    def __init__(self, options: list[str], log: Path, environment: Mapping[str, str], *, graphs: bool) -> None:
        self._options, self._log, self._environment = options, log, environment
        self.loop = "rounds as CUDA graphs" if graphs else "rounds kernel by kernel"
        self.facts: dict[str, Any] = {}
        """Speed of plain decoding, once known."""
        self._worker = self._start(graphs=graphs)

    def __enter__(self) -> "AcceptedLengths":
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def measure(self, directory: Path) -> dict[str, Any]:
        """Decode all prompts with the drafter in `directory`; see `Meter.measure`.

        Raises:
            WorkerFailedError: it cannot be measured.
        """
        try:
            return self._measured(directory)
        except WorkerFailedError as error:
            if not self._graphs:
                self._restart(graphs=False)
                raise
            self._restart(graphs=False)
            reason = error
        try:
            answer = self._measured(directory)
        except WorkerFailedError:
            # Not the graphs' fault.
            self._restart(graphs=True)
            raise
        self.loop = f"rounds kernel by kernel, because with graphs: {reason}"
        return answer

    def _measured(self, directory: Path) -> dict[str, Any]:
        if not self.facts:
            self.facts = self._worker.answer(LOAD_SECONDS)
        return self._worker.ask(MEASURE_SECONDS, directory=str(directory))

    def _restart(self, *, graphs: bool) -> None:
        self._worker.close()
        self._worker = self._start(graphs=graphs)

    def _start(self, *, graphs: bool) -> WorkerProcess:
        self._graphs, self.facts = graphs, {}
        flags = [] if graphs else ["--no-graphs"]
        return WorkerProcess(
            ["benchmarks.accepted_length_worker", *self._options, *flags], self._log, self._environment
        )


def keep(path: Path, content: dict[str, Any]) -> None:
    """Write a finished result so that a cut leaves either nothing or all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def kept(path: Path) -> dict[str, Any] | None:
    """What `keep` wrote, if it did."""
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
