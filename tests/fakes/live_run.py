"""A whole `drafter-trainer run` inside the test's own process, so that a fault can be put between any two events.

Everything is real: the target server (its engine in a thread), recipe, feeder, checkpoint writer, signals.
"""

import argparse
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drafter_trainer.agent_line import NO_AGENT
from drafter_trainer.metrics import MetricsFile, StepRecord
from drafter_trainer.start import RunOptions, train
from drafter_trainer.stop_request import StopRequest
from slipstream.run_spec.load import load_recipe
from slipstream.wire.transports import choose
from target_server import data_command
from target_server.target_model import TargetModel
from tests.fakes.live_target import LiveTarget
from tests.fakes.processes import Processes
from tests.fakes.tiny_models import save_tiny_model
from tests.fakes.tiny_run import RECIPE, write_conversations
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer
from tests.fakes.training import Trainer

EVALUATION = """
[eval]
prompts = "prompts.jsonl"
heldout = "heldout.jsonl"
num_prompts = 3
max_new_tokens = 24
"""


def write_heldout_run(directory: Path) -> Path:
    """As the tiny run's, with prompts of two sources that the target has answered; returns the recipe."""
    tokenizer = build_tiny_tokenizer(directory / "target", "chatml", vocab_size=384)
    # No row without a token: the random target would choose it.
    save_tiny_model(directory / "target", "llama", vocab_size=len(tokenizer), seed=0)
    write_conversations(directory / "conversations.jsonl")
    prompts = [{"source": ("news", "code")[n % 2], "prompt": "why " * (n + 1)} for n in range(8)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    path = directory / "tiny.toml"
    path.write_text(RECIPE.replace("block_size = 4", "block_size = 4\nmask_token_id = 0") + EVALUATION)
    parser = argparse.ArgumentParser()
    data_command.add_parsers(parser.add_subparsers(dest="command"))
    flags = ("--heldout", "--report", str(directory / "report.json"), "--device", "cpu")
    data_command.run(parser.parse_args(["regenerate", str(path), *flags]))
    return path


def stop_here() -> None:
    """SIGTERM to this process; returns once the run that trains in it has heard of it."""
    heard = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        ask = StopRequest._ask

        def ask_and_tell(request: StopRequest, asked_by: int) -> None:
            ask(request, asked_by)
            heard.set()

        patch.setattr(StopRequest, "_ask", ask_and_tell)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.wait(30)


@contextmanager
def live_target(recipe: Path, directory: Path) -> Iterator[LiveTarget]:
    """The recipe's target, served over gRPC from this process; its ledger lies in the directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(choose.FLOORS_GIGABYTES_PER_SECOND, "grpc", 0.0)  # of a busy machine
        model = TargetModel.load(load_recipe(recipe).spec.target, device="cpu")
        server = LiveTarget(model, directory / "ledger.sqlite", shm_dir=None)
        yield server
        server.close()


def go_away(server: LiveTarget) -> None:
    """As if it had died: calls in flight break, nobody answers any more."""
    server._grpc.stop(0).wait(30)


class LiveRun(Trainer):
    """A run whose trainer is this process: `train` as often as a test wants, from the main thread."""

    def __init__(self, recipe: Path, address: str, directory: Path, *settings: str) -> None:
        super().__init__(Processes(), recipe, directory, *settings)
        self._address = address
        self.agent = NO_AGENT
        """Who is told how the process stands."""

    def train(self, *settings: str) -> int:
        """What the command does between its arguments and its exit status.

        Raises:
            SlipstreamError: as the command prints it.
        """
        options = RunOptions(
            target=self._address,
            run_directory=self.directory,
            resume=True,
            log_every=1e9,
            threads=None,
            token=None,
            agent=self.agent,
        )
        return train(load_recipe(self._recipe, [*self._settings, *settings]).spec, options)

    def train_until(self, step: int) -> None:
        """Train so many steps; then SIGTERM comes, while the last of them is being recorded."""
        append = MetricsFile.append

        def told_to_stop(file: MetricsFile, record: StepRecord) -> None:
            append(file, record)
            if record.step == step - 1:
                stop_here()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MetricsFile, "append", told_to_stop)
            self.train()

    def measured(self) -> dict[int, float]:
        """Held-out accepted length by steps trained, from the last record of every step."""
        return measured_in(self)


def measured_in(run: Trainer) -> dict[int, float]:
    """The same of any run."""
    lengths: dict[int, float] = {}
    for record in run.records():
        step = int(str(record["step"])) + 1
        lengths.pop(step, None)
        if record["heldout_accepted_length"] is not None:
            lengths[step] = float(str(record["heldout_accepted_length"]))
    return lengths
