"""A target server and trainers as processes of their own on one GPU: started, gated, and read afterwards.

What benchmarks of whole trainings share. Every process sees one GPU, or none where the device is `cpu`.
"""

import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from slipstream.child_processes import child_process, visible_gpu

POLL_SECONDS = 0.1
SERVER_SECONDS = 120.0
CPU_SETTINGS = ("target.dtype=float32", "train.device=cpu", "train.attention=sdpa", "train.precision=float32")
"""What a try-out on a CPU changes in a recipe made for a GPU."""


class TrainingFailedError(Exception):
    """A process ended as it should not have; the text says which, and where its log lies."""


class InterruptedTrainingError(Exception):
    """The benchmark is to end."""


@dataclass(frozen=True)
class Place:
    """What runs where, the same for a server and its trainers."""

    model: str
    recipe: Path
    device: str
    """cuda or cpu"""
    gpu: int
    """Among the GPUs that this process sees."""
    settings: tuple[str, ...] = ()
    """KEY=VALUE of the recipe, for everyone."""
    stopped: Callable[[], bool] = lambda: False
    """Asked while waiting; True ends the wait with InterruptedTrainingError."""

    @property
    def environment(self) -> dict[str, str]:
        """Of every process that runs here."""
        return {} if self.device == "cpu" else {"CUDA_VISIBLE_DEVICES": visible_gpu(self.gpu)}

    def overrides(self, *more: str) -> list[str]:
        """`--set` and a setting, by turns; the last one counts."""
        own = CPU_SETTINGS if self.device == "cpu" else ()
        return [
            word for each in (f"target.model={self.model}", *own, *self.settings, *more) for word in ("--set", each)
        ]


def missing_input(model: str, files: Sequence[Path | None], device: str, gpus: Sequence[int]) -> str | None:
    """What such a benchmark lacks, in words, found in the first seconds; None: nothing."""
    gone = [path for path in files if path is not None and not path.exists()]
    if gone:
        return f"{gone[0]} does not exist"
    is_file = model.endswith(".gguf")
    if (is_file or model.startswith((".", "/"))) and not Path(model).exists():
        return f"--model {model} does not exist"
    lacking = [name for name in ("gguf", "accelerate") if is_file and importlib.util.find_spec(name) is None]
    if lacking:
        return f"reading {model} needs the package {lacking[0]}"
    if device == "cpu":
        return None
    import torch

    if torch.cuda.device_count() <= max(gpus):
        return f"torch finds {torch.cuda.device_count()} GPUs, --gpus names {list(gpus)}; a try-out: --device cpu"
    return None


@dataclass(frozen=True)
class TargetServer:
    """A running one."""

    address: str
    process: Popen[bytes]
    log: str

    def check(self) -> None:
        """Trainers would wait for one that comes back.

        Raises:
            TrainingFailedError: it has ended.
        """
        if self.process.poll() is not None:
            raise TrainingFailedError(f"the target server ended with {self.process.returncode}, see {self.log}")


@contextmanager
def target_server(place: Place, directory: Path, data_root: Path) -> Iterator[TargetServer]:
    """A target server on the GPU, once it listens. It loads still; its clients wait for that.

    Raises:
        TrainingFailedError: it ended at once.
    """
    directory.mkdir(parents=True, exist_ok=True)
    port_file = directory / "target.port"
    port_file.unlink(missing_ok=True)
    # A recipe names data of its own, which a server without a run has no use for.
    command = [sys.executable, "-m", "target_server", "serve", str(place.recipe), *place.overrides()]
    command += ["--listen", "127.0.0.1:0", "--port-file", str(port_file), "--device", place.device]
    # A finished run must not hold back the one that follows it.
    command += ["--subscription-timeout", "10", "--data-root", str(data_root)]
    command += ["--ledger", str(directory / f"ledger-{time.time_ns()}.sqlite")]
    with (
        (directory / "target-server.log").open("wb") as log,
        child_process(command, environment=place.environment, output=log) as server,
    ):
        deadline = time.monotonic() + SERVER_SECONDS
        while not port_file.exists():
            if server.poll() is not None or time.monotonic() > deadline:
                raise TrainingFailedError(f"the target server did not start (status {server.poll()}), see {log.name}")
            _pause(place)
        address = f"127.0.0.1:{port_file.read_text().strip().rpartition(':')[2]}"
        yield TargetServer(address, server, str(log.name))


class TrainerProcess:
    """A trainer that warms up at once, and trains from `begin` on. Use as a context manager: it ends with the block.

    Args:
        place: where.
        server: its target.
        directory: of the run; what lies there is removed.
        settings: KEY=VALUE of this run.
        seconds: of training; None: by the recipe's steps.
    """

    def __init__(
        self, place: Place, server: TargetServer, directory: Path, settings: Sequence[str], seconds: float | None = None
    ) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self.run_directory = directory / "run"
        self._place, self._server, self._ready, self._go = place, server, directory / "ready", directory / "go"
        command = [sys.executable, "-m", "benchmarks.timed_trainer", "--ready", str(self._ready), "--go", str(self._go)]
        command += ["--seconds", str(seconds)] if seconds is not None else []
        command += ["run", str(place.recipe), *place.overrides("train.max_tokens=", *settings)]
        command += ["--target", server.address, "--run-dir", str(self.run_directory), "--resume", "never"]
        command += ["--threads", "1"] if place.device == "cpu" else []
        self._leaving = ExitStack()
        self._log = self._leaving.enter_context((directory / "trainer.log").open("wb"))
        self._process: Popen[bytes] = self._leaving.enter_context(
            child_process(command, environment=place.environment, output=self._log)
        )

    def __enter__(self) -> "TrainerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, if it still runs."""
        self._leaving.close()

    def wait_until_ready(self) -> None:
        """Until it has compiled and tried its step.

        Raises:
            TrainingFailedError: it ended.
            InterruptedTrainingError: see `Place.stopped`.
        """
        while not self._ready.exists():
            if self._process.poll() is not None:
                raise self._failure()
            self._server.check()
            _pause(self._place)

    def begin(self) -> None:
        """Let it train."""
        self._go.touch()

    def wait(self) -> dict[str, Any]:
        """Until it has ended; what it did, see `summary`.

        Raises:
            TrainingFailedError: it failed.
            InterruptedTrainingError: see `Place.stopped`.
        """
        while self._process.poll() is None:
            self._server.check()
            _pause(self._place)
        if self._process.returncode != 0:
            raise self._failure()
        return summary(self.run_directory)

    def _failure(self) -> TrainingFailedError:
        self._log.flush()
        lines = [line.strip() for line in Path(self._log.name).read_text(errors="replace").splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("error")] or lines[-1:]
        last = said[-1] if said else "it said nothing"
        return TrainingFailedError(f"the trainer ended with {self._process.returncode}, see {self._log.name}: {last}")


def step_records(run: Path) -> list[dict[str, Any]]:
    """The steps of a run from its metrics."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record]


def summary(run: Path) -> dict[str, Any]:
    """Steps, tokens, seconds and speed of a run, without the first step, which waits for the first pack."""
    records = step_records(run)
    steady = records[1:] or records
    seconds = sum(record["seconds"] for record in steady)
    tokens = records[-1]["tokens"] - (records[0]["tokens"] if len(records) > 1 else 0)
    last = records[-max(1, len(records) // 20) :]
    return {
        "steps": len(records),
        "tokens": records[-1]["tokens"],
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "data_wait_share": sum(record["data_wait_seconds"] for record in steady) / seconds,
        "last_matched_prefix": sum(record["mean_matched_prefix"] for record in last) / len(last),
    }


def checkpoints(run: Path) -> list[tuple[float, Path]]:
    """Training seconds at each checkpoint of a run, and its directory, oldest first."""
    seconds, at_step = 0.0, {}
    for number, record in enumerate(step_records(run)):
        seconds += record["seconds"] if number else 0.0
        at_step[record["step"] + 1] = seconds
    found = sorted((run / "checkpoints").glob("step-[0-9]*"))
    steps = {int(directory.name.rpartition("-")[2]): directory for directory in found}
    return [(at_step[step], directory) for step, directory in sorted(steps.items()) if step in at_step]


def _pause(place: Place) -> None:
    if place.stopped():
        raise InterruptedTrainingError("the benchmark was told to end")
    time.sleep(POLL_SECONDS)
