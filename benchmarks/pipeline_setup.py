"""What the parts of benchmarks/pipeline.py start: a target to serve, the commands on it, a trainer that is watched."""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.target_workload import SHAPES
from benchmarks.worker_process import WorkerFailedError
from slipstream.child_processes import child_process, one_gpu
from slipstream.run_spec.load import load_recipe

WRITE_SECONDS = 180.0
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""For processes that are to cost the device nothing."""
GPU_RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2-135m-1gpu.toml"
CPU_RECIPE = """
name = "pipeline"
[target]
model = "set by the benchmark"
dtype = "float32"
[data]
files = ["set by the benchmark"]
pack_tokens = 2048
[drafter]
num_layers = 2
target_layer_ids = [0, 2]
block_size = 4
[train]
device = "cpu"
attention = "sdpa"
precision = "float32"
anchors_per_pack = 64
max_steps = 1
"""


@dataclass(frozen=True)
class Setup:
    """One target and the run that reads it."""

    title: str
    recipe: Path
    overrides: tuple[str, ...]
    device: str
    work: Path
    environment: Mapping[str, str]
    """What the server and the trainer see besides this process's environment."""

    @property
    def pack_tokens(self) -> int:
        return load_recipe(self.recipe, self.overrides).spec.data.pack_tokens

    def serve(self) -> list[str]:
        """Arguments of `target-server serve`."""
        threads = ["--threads", "1"] if self.device == "cpu" else []
        # A run that has ended must not hold back the next one.
        patience = ["--subscription-timeout", "10"]
        return [str(self.recipe), *self._sets(), "--device", self.device, *threads, *patience]

    def subscribe(self, address: str) -> list[str]:
        """Module and arguments of a reader."""
        return ["benchmarks.stream_worker", str(self.recipe), *self._sets(), "--address", address]

    def train(self, address: str, directory: Path, more: Sequence[str]) -> list[str]:
        """Module and arguments of a trainer; `more`: settings of this run alone."""
        threads = ["--threads", "1"] if self.device == "cpu" else []
        command = ["drafter_trainer", "run", str(self.recipe), *self._sets(more), "--target", address]
        return [*command, "--run-dir", str(directory), *threads]

    def _sets(self, more: Sequence[str] = ()) -> list[str]:
        return [word for override in (*self.overrides, *more) for word in ("--set", override)]


def environment_of(device: str) -> Mapping[str, str]:
    """What the processes of a device see: its first GPU, or none."""
    return one_gpu() if device == "cuda" else NO_GPU


def set_up(model: str, args: argparse.Namespace, work: Path, more: Sequence[str] = ()) -> Setup:
    """Write what the model needs; `more`: settings that count less than the command line's.

    Raises:
        WorkerFailedError: the target could not be written.
    """
    recipe = args.recipe or (GPU_RECIPE if args.device == "cuda" else work / "recipe.toml")
    if recipe == work / "recipe.toml":
        recipe.write_text(CPU_RECIPE, encoding="utf-8")
    environment = environment_of(args.device)
    if model not in SHAPES:
        overrides = (f"target.model={Path(model).resolve()}", *more, *args.overrides)
        return Setup(Path(model).name, recipe, overrides, args.device, work, environment)
    command = [sys.executable, "-m", "benchmarks.random_target", model, str(work), "--device", args.device]
    log = args.out / "pipeline-write-target.log"
    with log.open("wb") as file, child_process(command, environment=environment, output=file) as child:
        try:
            status = child.wait(WRITE_SECONDS)
        except subprocess.TimeoutExpired:
            raise WorkerFailedError(f"the target was not written in time, see {log.name}") from None
    if status != 0:
        raise WorkerFailedError(f"the target was not written, see {log.name}")
    overrides = (
        f"target.model={work / 'target'}",
        f"data.files={json.dumps([str(work / 'documents.jsonl')])}",
        "data.format=tokens",
        "drafter.mask_token=",
        "drafter.mask_token_id=2",
        f"drafter.target_layer_ids={list(SHAPES[model].layer_ids)}",
    )
    overrides = (*overrides, *more, *args.overrides)
    return Setup(SHAPES[model].title, recipe, overrides, args.device, work, environment)


class Trainer:
    """A `drafter-trainer run` whose metrics are read meanwhile. Use as a context manager: it ends with the block."""

    def __init__(self, setup: Setup, address: str, name: str, log: Path, settings: Sequence[str]) -> None:
        """`settings`: of this run alone."""
        directory = setup.work / name
        self._metrics = directory / "metrics.jsonl"
        self._command = [sys.executable, "-m", *setup.train(address, directory, (f"name={name}", *settings))]
        self._environment = setup.environment
        self._log = log
        self._leaving = ExitStack()
        self._read_bytes = 0
        self._records: list[dict[str, Any]] = []

    def __enter__(self) -> "Trainer":
        output = self._leaving.enter_context(self._log.open("wb"))
        child = child_process(self._command, environment=self._environment, output=output)
        self._process = self._leaving.enter_context(child)
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def runs(self) -> bool:
        """Whether the process is alive."""
        return self._process.poll() is None

    def status(self) -> int | None:
        """Of its exit; None while it runs."""
        return self._process.poll()

    def records(self) -> list[dict[str, Any]]:
        """Of the steps so far."""
        if self._metrics.exists():
            with self._metrics.open("rb") as file:
                file.seek(self._read_bytes)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            found = [json.loads(line) for line in whole.splitlines()]
            self._records += [record for record in found if "loss" in record]
        return self._records

    def tokens(self) -> int:
        """Trained so far, padding included."""
        records = self.records()
        return records[-1]["tokens"] if records else 0
