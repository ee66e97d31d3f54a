"""Trainers that would compile the same thing take turns, also when the one that has the turn is killed."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.processes import ManagedProcess

TRAINER = """
import signal, sys
from pathlib import Path
from drafter_trainer.compile_cache import compiling_turn
from drafter_trainer.stop_request import StopRequest
from slipstream.telemetry.logs import configure_logging
from slipstream.wire.channel import WaitInterruptedError

configure_logging("trainer")
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1,))
folder, what = Path(sys.argv[1]), sys.argv[2]
with StopRequest() as stop:
    try:
        with compiling_turn(folder, what, stop.event):
            if any(folder.glob("compiled-*.json")):
                print("loaded")
            else:
                print("compiling")
                signal.sigwait((signal.SIGUSR1,))
    except WaitInterruptedError as interrupted:
        print("stopped:", interrupted)
"""


class Trainers:
    """Processes that compile until they get SIGUSR1."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[ManagedProcess] = []

    def start(self, what: str = "a shape") -> ManagedProcess:
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        trainer = ManagedProcess([sys.executable, "-c", TRAINER, str(self._folder), what], env=environment)
        self._started.append(trainer)
        return trainer

    def close(self) -> None:
        for trainer in self._started:
            trainer.__exit__(None, None, None)


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Trainers]:
    running = Trainers(tmp_path / "cache")
    yield running
    running.close()


def finish(trainer: ManagedProcess) -> None:
    os.kill(trainer.pid, signal.SIGUSR1)
    assert trainer.wait_exit() == 0, trainer.output


def test_one_compiles_and_the_others_wait_and_say_for_whom(trainers: Trainers) -> None:
    first = trainers.start()
    first.wait_for_line("^compiling$")
    others = [trainers.start(), trainers.start()]
    for other in others:
        other.wait_for_line(f"waiting_for_compile_cache.*process {first.pid} on ")
    another_shape = trainers.start("another shape")
    another_shape.wait_for_line("^compiling$")
    finish(first)
    for other in others:
        other.wait_for_line("^loaded$")
        assert other.wait_exit() == 0
    late = trainers.start()
    late.wait_for_line("^loaded$")
    assert "waiting" not in late.output


def test_when_the_one_with_the_turn_is_killed_one_of_the_others_takes_it(trainers: Trainers) -> None:
    first = trainers.start()
    first.wait_for_line("^compiling$")
    second = trainers.start()
    second.wait_for_line(f"process {first.pid} on ")
    first.kill()
    second.wait_for_line("^compiling$")
    third = trainers.start()
    third.wait_for_line(f"process {second.pid} on ")
    finish(second)
    third.wait_for_line("^loaded$")


def test_a_waiting_trainer_that_is_told_to_stop_stops(trainers: Trainers) -> None:
    first = trainers.start()
    first.wait_for_line("^compiling$")
    second = trainers.start()
    second.wait_for_line(f"process {first.pid} on ")
    second.terminate()
    second.wait_for_line("^stopped: ")
    assert second.wait_exit() == 0
    finish(first)
