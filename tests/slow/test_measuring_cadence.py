"""Held-out acceptance as often as the recipe says: the same series however the run is stopped."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafter_trainer.agent_line import AgentLine
from drafter_trainer.batch_source import BatchSource
from drafter_trainer.checkpoint_state import best_checkpoint, read_state
from drafter_trainer.heldout import HeldoutEvaluation, HeldoutResult
from drafter_trainer.step import TrainingStep
from drafter_trainer.wait_notice import WaitNotice
from slipstream.run_spec.reasons import Reason
from tests.fakes.live_run import LiveRun, go_away, live_target, stop_here, write_heldout_run
from tests.fakes.training import assert_same_run

LENGTH = ("train.max_steps=22", "checkpoint.every_steps=10", "checkpoint.keep=9")
EVERY = "eval.every_steps=4"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heldout_run(tmp_path_factory.mktemp("heldout"))


@pytest.fixture(scope="module")
def address(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with live_target(recipe, tmp_path_factory.mktemp("ledger")) as server:
        yield server.address


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, address: str, tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    run = LiveRun(recipe, address, tmp_path_factory.mktemp("undisturbed"), *LENGTH, EVERY, "name=undisturbed")
    assert run.train() == 0
    return run


def estimates(run: LiveRun) -> dict[int, float | None]:
    """What the checkpoints say of themselves, by steps trained."""
    states = [read_state(path) for path in (run.directory / "checkpoints").glob("step-*")]
    return {state.cursor.next_step: state.heldout and state.heldout.accepted_length for state in states}


def best_step(run: LiveRun) -> int:
    best = best_checkpoint(run.directory / "checkpoints")
    assert best is not None
    return read_state(best).cursor.next_step


def test_it_is_measured_as_often_as_the_recipe_says(undisturbed: LiveRun) -> None:
    found = undisturbed.measured()
    assert found.keys() == {4, 8, 12, 16, 20, 22}
    records = undisturbed.records()
    assert [record["step"] for record in records] == list(range(22))
    assert all((record["heldout_sources"] is None) == (record["heldout_seconds"] == 0.0) for record in records)
    # The best is one of the checkpoints, and of these only what was measured at their own step counts.
    assert estimates(undisturbed) == {10: None, 20: found[20], 22: found[22]}
    assert best_step(undisturbed) == max((20, 22), key=lambda step: found[step])


def test_without_a_word_it_is_measured_at_every_checkpoint(
    undisturbed: LiveRun, recipe: Path, address: str, tmp_path: Path
) -> None:
    run = LiveRun(recipe, address, tmp_path, *LENGTH, "name=by-checkpoint")
    run.train()
    assert run.measured().keys() == {10, 20, 22}
    assert estimates(run) == run.measured()
    both = run.measured().keys() & undisturbed.measured().keys()
    assert {step: run.measured()[step] for step in both} == {step: undisturbed.measured()[step] for step in both}
    assert_same_run(run, undisturbed)


def test_a_stop_while_it_is_measured_loses_no_measurement(
    undisturbed: LiveRun, recipe: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop does not wait for the measurement; the next start makes it first, also when it is stopped itself."""
    run = LiveRun(recipe, address, tmp_path, *LENGTH, EVERY, "name=stopped")
    measure = HeldoutEvaluation.measure
    begun: list[int] = []
    stopped_in = {3, 4}

    def told_to_stop(evaluation: HeldoutEvaluation, step: TrainingStep) -> HeldoutResult | None:
        begun.append(len(begun) + 1)
        if begun[-1] in stopped_in:
            stop_here()
        return measure(evaluation, step)

    monkeypatch.setattr(HeldoutEvaluation, "measure", told_to_stop)
    run.train()
    assert run.measured().keys() == {4, 8} and estimates(run) == {10: None, 12: None}
    run.train()
    assert run.measured().keys() == {4, 8} and len(run.records()) == 12, "stopped again before it was measured"
    run.train()
    assert run.measured() == undisturbed.measured()
    # Of step 12 there are two records: without the measurement, and with it. Nothing else was written twice.
    assert [record["step"] for record in run.records()] == [*range(12), *range(11, 22)]
    assert_same_run(run, undisturbed)
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint-writer"]


def test_a_stop_while_the_last_step_is_measured_ends_no_run(
    undisturbed: LiveRun, recipe: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent is told that it was stopped: a run that counts as finished is never started again."""
    run = LiveRun(recipe, address, tmp_path, *LENGTH, EVERY, "name=stopped-last")
    measure = HeldoutEvaluation.measure
    start_source = BatchSource.start
    begun: list[int] = []

    def told_to_stop(evaluation: HeldoutEvaluation, step: TrainingStep) -> HeldoutResult | None:
        begun.append(len(begun) + 1)
        if begun[-1] in (6, 7):
            stop_here()
        return measure(evaluation, step)

    def train() -> str:
        """How the process ended, in its own word to its agent."""
        agent, child = socket.socketpair()
        run.agent = AgentLine(child.detach())
        assert run.train() == 0
        with agent, agent.makefile("r") as lines:
            return next(news["end"] for news in map(json.loads, lines) if "end" in news)

    def stop_before_it_goes_on(source: BatchSource, next_step: int) -> None:
        stop_here()
        start_source(source, next_step)

    monkeypatch.setattr(HeldoutEvaluation, "measure", told_to_stop)
    assert [train(), train()] == ["stopped", "stopped"]
    with monkeypatch.context() as patch:
        patch.setattr(BatchSource, "start", stop_before_it_goes_on)
        assert train() == "stopped"
    assert len(begun) == 7 and len(run.records()) == 22
    assert 22 not in run.measured() and estimates(run)[22] is None
    assert train() == "finished"
    assert run.measured() == undisturbed.measured() and estimates(run) == estimates(undisturbed)
    assert [record["step"] for record in run.records()] == [*range(22), 21]
    assert best_step(run) == best_step(undisturbed)
    assert_same_run(run, undisturbed)
    assert train() == "finished" and len(begun) == 8, "nothing is left to do"


def test_a_target_that_dies_while_it_is_measured(
    undisturbed: LiveRun, recipe: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not needed for that: the measurement is recorded, the run waits with its next step, and stops when told."""
    measure, notice = HeldoutEvaluation.measure, WaitNotice.__call__
    away, stopping = threading.Event(), threading.Lock()

    def told_to_stop(waiting: WaitNotice, reason: Reason, seconds: float) -> None:
        notice(waiting, reason, seconds)
        if away.is_set() and stopping.acquire(blocking=False):
            stop_here()

    with live_target(recipe, tmp_path) as server:
        run = LiveRun(recipe, server.address, tmp_path / "run", *LENGTH, EVERY, "name=orphan")

        def target_dies(evaluation: HeldoutEvaluation, step: TrainingStep) -> HeldoutResult | None:
            if not away.is_set():
                go_away(server)
                away.set()
            return measure(evaluation, step)

        with monkeypatch.context() as patch:
            patch.setattr(HeldoutEvaluation, "measure", target_dies)
            patch.setattr(WaitNotice, "__call__", told_to_stop)
            run.train()
    assert away.is_set() and run.measured().keys() <= {4, 8}
    LiveRun(recipe, address, run.directory, *LENGTH, EVERY, "name=orphan").train()
    assert run.measured() == undisturbed.measured()
    assert_same_run(run, undisturbed)


def test_the_cadence_may_change_when_a_run_goes_on(recipe: Path, address: str, tmp_path: Path) -> None:
    run = LiveRun(recipe, address, tmp_path, *LENGTH, "name=changed")
    run.train("checkpoint.every_steps=5", "eval.every_steps=15")
    assert run.measured().keys() == {15, 22}
    run.train("eval.every_steps=1")
    assert run.measured().keys() == {15, 22}, "nothing was trained, so nothing is new"
