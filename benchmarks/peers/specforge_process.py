"""Starts the peer's training as a process and reads what it did."""

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.served_training import POLL_SECONDS, InterruptedTrainingError, Place, TrainingFailedError
from slipstream.child_processes import child_process

PEER_DEFAULTS = ("block_size=16", "batch=4", "learning_rate=6e-4", "loss_type=dflash")
"""Of its DFlash recipes; flags of benchmarks/peers/specforge_run.py."""


def run_peer(
    place: Place, directory: Path, conversations: Path, seconds: float, settings: Sequence[str]
) -> dict[str, Any]:
    """Train to the end; what happened, and where the drafter lies.

    Raises:
        TrainingFailedError: it failed.
        InterruptedTrainingError: see `Place.stopped`.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    command = [sys.executable, "-m", "benchmarks.peers.specforge_run", "--model", place.model]
    command += ["--conversations", str(conversations), "--recipe", str(place.recipe), "--out", str(directory)]
    command += ["--seconds", str(seconds), "--device", place.device]
    for setting in settings:
        name, _, value = setting.partition("=")
        command += [f"--{name.replace('_', '-')}", value]
    log_path = directory / "peer.log"
    with (
        log_path.open("wb") as log,
        child_process(command, environment=place.environment, output=log) as process,
    ):
        while process.poll() is None:
            if place.stopped():
                raise InterruptedTrainingError("the benchmark was told to end")
            time.sleep(POLL_SECONDS)
    if process.returncode != 0:
        lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
        raise TrainingFailedError(f"the peer ended with {process.returncode}, see {log_path}: {lines[-1:]}")
    report: dict[str, Any] = json.loads((directory / "run.json").read_text())
    return {**report, "drafters": [[report["seconds"], str((directory / "drafter").resolve())]]}
