"""A trainer process under test, and what its run directory says afterwards."""

import json
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from tests.fakes.processes import ManagedProcess, Processes


class Trainer:
    """Starts `drafter-trainer run` for one run, as often as a test wants."""

    def __init__(self, processes: Processes, recipe: Path, directory: Path, *settings: str) -> None:
        self._processes = processes
        self._recipe = recipe
        self._settings = settings
        self.directory = directory

    def command(self, address: str, *arguments: str) -> list[str]:
        """What comes behind `drafter-trainer`."""
        overrides = [word for setting in self._settings for word in ("--set", setting)]
        flags = ("--threads", "1", "--log-every", "0")
        return [
            *("run", str(self._recipe), "--target", address, "--run-dir", str(self.directory)),
            *(*flags, *overrides, *arguments),
        ]

    def start(self, address: str, *arguments: str) -> ManagedProcess:
        """The process; it prints a progress line after every step."""
        return self._processes.start("drafter_trainer", *self.command(address, *arguments))

    def finish(self, address: str, *arguments: str, timeout: float = 120.0) -> ManagedProcess:
        """Start, and wait until the run is finished."""
        process = self.start(address, *arguments)
        assert process.wait_exit(timeout=timeout) == 0, process.output
        assert "run_finished" in process.output, process.output
        return process

    def losses(self) -> dict[int, object]:
        """The exact loss in the last record of every step."""
        records = read_last_records(self.directory / "metrics.jsonl")
        return {step: record["loss_hex"] for step, record in records.items()}

    def weights(self) -> dict[str, Tensor]:
        """Of the newest checkpoint."""
        return safetensors.torch.load_file(self.directory / "checkpoints" / "latest" / "drafter.safetensors")

    def records(self) -> list[dict[str, object]]:
        """Every record, in the order written."""
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]


def read_last_records(path: Path) -> dict[int, dict[str, object]]:
    """The last record of every step in a metrics file, by step; a torn last line is left out."""
    whole_lines = path.read_bytes().rpartition(b"\n")[0]
    return {record["step"]: record for record in map(json.loads, whole_lines.splitlines())}


def assert_same_run(run: Trainer, expected: Trainer) -> None:
    """Bit for bit: the last loss of every step, and the final weights."""
    assert run.losses() == expected.losses()
    weights, expected_weights = run.weights(), expected.weights()
    assert weights.keys() == expected_weights.keys()
    different = [name for name in weights if not torch.equal(weights[name], expected_weights[name])]
    assert not different
