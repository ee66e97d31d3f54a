"""Runs through a control API and a trainer agent, all as processes: verbs, crashes, and the same weights in the end."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.fakes.agent_stack import Stack, agent_stack
from tests.fakes.processes import Processes
from tests.fakes.training import Trainer, assert_same_run

STEPS = 40
LENGTH = ("train.max_steps=40", "checkpoint.every_steps=5", "checkpoint.keep=3")


@pytest.fixture
def stack(processes: Processes, tiny_recipe: Path, target_address: str, tmp_path: Path) -> Iterator[Stack]:
    with agent_stack(processes, tiny_recipe, target_address, tmp_path) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(tiny_recipe: Path, target_address: str, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """The same run, from start to end in one process, without control API and agent."""
    processes = Processes()
    run = Trainer(processes, tiny_recipe, tmp_path_factory.mktemp("undisturbed"), *LENGTH, "name=undisturbed")
    run.finish(target_address)
    processes.close()
    return run


def trained(stack: Stack, run: str, recipe: Path) -> Trainer:
    """What the agent's training processes have left."""
    return Trainer(stack.processes, recipe, stack.directory / "runs" / run)


def ascending_spans(steps: list[int]) -> list[list[int]]:
    """Cut where a step is not above the one before."""
    cuts = [0, *(index for index in range(1, len(steps)) if steps[index] <= steps[index - 1]), len(steps)]
    return [steps[start:end] for start, end in pairwise(cuts)]


def test_verbs_and_a_control_api_that_is_away(stack: Stack, tiny_recipe: Path, undisturbed: Trainer) -> None:
    for step in (10, 20, 30):
        stack.faults.hold(step)
    agent = stack.start_agent()
    stack.create("verbs", *LENGTH)
    agent.wait_for_line("reported run=verbs state=RUNNING", timeout=90)
    assert stack.state("verbs") == "RUNNING"
    data = stack.client.get("/v1/runs/verbs")["data"]
    assert data["read"] == data["used"] > 0 and data["dropped"] == [], "what the target found in the data"

    stack.faults.wait_until_held(10)
    stack.api.kill()
    agent.wait_for_line("control_api_does_not_answer", timeout=60)
    stack.faults.let_go(10)
    # Training goes on meanwhile.
    stack.faults.wait_until_held(20)
    stack.restart_api()
    agent.wait_for_line("control_api_is_back", timeout=60)
    assert stack.state("verbs") == "RUNNING"

    stack.verb("verbs", "pause")
    agent.wait_for_line("child_asked_to_leave", timeout=60)
    stack.faults.let_go(20)
    agent.wait_for_line("reported run=verbs state=PAUSED", timeout=60)
    assert stack.state("verbs") == "PAUSED"
    stopped_after = len(stack.steps("verbs"))
    assert stack.steps("verbs") == list(range(stopped_after)), "a metric is missing"
    assert 20 <= stopped_after < 30

    seen = len(agent.lines)
    stack.verb("verbs", "resume")
    stack.faults.wait_until_held(30)
    stack.verb("verbs", "stop")
    agent.wait_for_line("child_asked_to_leave", start=seen, timeout=60)
    stack.faults.let_go(30)
    agent.wait_for_line("reported run=verbs state=STOPPED", start=seen, timeout=60)
    agent.wait_for_line("assignment_over", start=seen, timeout=60)
    assert stack.state("verbs") == "STOPPED"

    stack.verb("verbs", "resume")
    agent.wait_for_line("reported run=verbs state=SUCCEEDED", timeout=90)
    assert stack.state("verbs") == "SUCCEEDED"
    assert stack.steps("verbs") == list(range(STEPS)), "a step was trained twice, or a metric is missing"
    assert stack.client.get("/v1/runs/verbs")["progress"]["step"] == STEPS
    assert_same_run(trained(stack, "verbs", tiny_recipe), undisturbed)
    logs = stack.directory / "runs" / "verbs" / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["attempt-0001.log", "attempt-0002.log"]
    lines = [one["text"] for one in stack.client.listing("/v1/runs/verbs/logs")]
    written = [line for path in sorted(logs.iterdir()) for line in path.read_text().splitlines()]
    assert any(" stopped " in line for line in written)
    assert not any("run the same command again" in line for line in written), "no command of a person started it"
    assert lines == written, "a line of the log is missing"
    agent.terminate()
    assert agent.wait_exit() == 0, agent.output


def test_a_training_process_killed_three_times(stack: Stack, tiny_recipe: Path, undisturbed: Trainer) -> None:
    stack.faults.kill(10, 20, 30)
    agent = stack.start_agent()
    stack.create("killed", *LENGTH)
    agent.wait_for_line("reported run=killed state=SUCCEEDED", timeout=180)
    assert stack.state("killed") == "SUCCEEDED"
    died = [event["data"] for event in stack.events("killed", "CHILD_DIED")]
    assert [(one["child"], one["exit_code"], one["will_restart"]) for one in died] == [
        (number, -9, True) for number in (1, 2, 3)
    ]
    assert all(one["log_tail"] and "SIGKILL" in one["message"] and one["remedy"] for one in died)
    log = (stack.directory / "runs" / "killed" / "logs" / "attempt-0001.log").read_text()
    assert [f"next_step={step}" in log for step in (5, 15, 25)] == [True] * 3, log
    # Steps after the checkpoint were trained and recorded again. A process dies as it begins to write a checkpoint,
    # while it trains on, at most until the next save: so many steps may be there besides.
    spans = ascending_spans(stack.steps("killed"))
    assert [span[0] for span in spans] == [0, 5, 15, 25]
    assert all(span == list(range(span[0], span[-1] + 1)) for span in spans), "a metric is missing"
    assert all(saved <= span[-1] + 1 <= saved + 5 for saved, span in zip((10, 20, 30), spans, strict=False))
    assert spans[-1][-1] + 1 == STEPS
    assert_same_run(trained(stack, "killed", tiny_recipe), undisturbed)
