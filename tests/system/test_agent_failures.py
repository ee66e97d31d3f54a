"""Trainer agents that die, leave, or cannot train: runs go on by themselves, or end with a reason."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.agent_stack import Stack, agent_stack
from tests.fakes.process_group import survivors
from tests.fakes.processes import Processes
from tests.fakes.training import Trainer, assert_same_run

STEPS = 30
LENGTH = ("train.max_steps=30", "checkpoint.every_steps=5")


@pytest.fixture
def stack(processes: Processes, tiny_recipe: Path, target_address: str, tmp_path: Path) -> Iterator[Stack]:
    with agent_stack(processes, tiny_recipe, target_address, tmp_path) as started:
        yield started


def test_an_agent_that_is_killed_and_one_that_leaves(
    stack: Stack, tiny_recipe: Path, target_address: str, processes: Processes, tmp_path: Path
) -> None:
    stack.faults.hold(10)
    stack.faults.hold(20)
    agent = stack.start_agent("first")
    stack.create("moved", *LENGTH)
    orphan = int(agent.wait_for_line(r"child_started .*pid=(\d+)", timeout=60).group(1))
    undisturbed = Trainer(processes, tiny_recipe, tmp_path / "undisturbed", *LENGTH, "name=undisturbed")
    undisturbed.finish(target_address, timeout=90)
    stack.faults.wait_until_held(10)

    second = stack.start_worker("first")
    assert second.wait_exit() == 3
    assert "Another agent has the state directory" in second.output and "Traceback" not in second.output

    agent.kill()
    again = stack.start_agent("first")
    again.wait_for_line(f"waiting_for_orphan pid={orphan}", timeout=60)
    stack.faults.let_go(10)
    again.wait_for_line(r"child_started .*child=2", timeout=60)
    assert survivors(orphan, seconds=30) == []
    stack.faults.wait_until_held(20)
    again.wait_for_line("reported run=moved state=RUNNING", timeout=60)
    assert stack.state("moved") == "RUNNING"

    again.terminate()
    again.wait_for_line("child_asked_to_leave", timeout=60)
    stack.faults.let_go(20)
    assert again.wait_exit(timeout=60) == 0, again.output
    assert "reported run=moved state=STOPPED" in again.output and "told_the_api=true" in again.output
    assert stack.state("moved") == "PENDING"

    other = stack.start_agent("other")
    other.wait_for_line("reported run=moved state=SUCCEEDED", timeout=120)
    assert stack.state("moved") == "SUCCEEDED"
    assert stack.steps("moved") == list(range(STEPS)), "a step was lost, or trained twice"
    moved = Trainer(processes, tiny_recipe, stack.directory / "runs" / "moved")
    assert_same_run(moved, undisturbed)
    assert [record["attempt"] for record in (one["data"] for one in stack.events("moved", "TRAINER_ASSIGNED"))] == [
        1,
        2,
    ]


def test_a_training_process_that_always_dies(stack: Stack) -> None:
    stack.faults.kill("start")
    agent = stack.start_agent()
    stack.create("hopeless", *LENGTH)
    agent.wait_for_line("reported run=hopeless state=FAILED", timeout=90)
    run = stack.client.get("/v1/runs/hopeless")
    assert run["state"] == "FAILED"
    died = [event["data"] for event in stack.events("hopeless", "CHILD_DIED")]
    assert [one["will_restart"] for one in died] == [True, True, True, False]
    assert died[-1]["reason"] == "INTERNAL" and died[-1]["exit_code"] == -signal.SIGKILL
    assert "killed by a fault" in died[-1]["log_tail"]
    assert "No checkpoint was saved in the last 4 starts" in died[-1]["message"]
    assert "attempt-0001.log" in died[-1]["remedy"]


def test_what_cannot_be_mended_is_not_tried_again(stack: Stack, target_address: str) -> None:
    agent = stack.start_agent()
    length = ("train.max_steps=100000", "train.epochs=1")
    stack.create("explosive", "optimizer.learning_rate=1e38", "optimizer.warmup_fraction=0", *length)
    agent.wait_for_line("reported run=explosive state=FAILED", timeout=90)
    (died,) = [event["data"] for event in stack.events("explosive", "CHILD_DIED")]
    assert (died["reason"], died["exit_code"], died["will_restart"]) == ("LOSS_NOT_FINITE", 9, False)
    assert "3 steps in a row" in died["message"] and "learning_rate" in died["remedy"]
    run = stack.client.get("/v1/runs/explosive")
    assert run["state"] == "FAILED"
    assert run["progress"]["step"] == 4 and run["progress"]["max_steps"] < 1000, "the length is what the child found"
    # It is free for another run, which a second SIGTERM takes from it at once.
    stack.faults.hold(5)
    stack.create("interrupted", *LENGTH)
    child = int(agent.wait_for_line(r"child_started run=interrupted .*pid=(\d+)", timeout=60).group(1))
    stack.faults.wait_until_held(5)
    agent.terminate()
    agent.wait_for_line("child_asked_to_leave", timeout=60)
    agent.terminate()
    assert agent.wait_exit() == 128 + signal.SIGTERM
    assert "Traceback" not in agent.output
    assert survivors(child, seconds=30) == []
