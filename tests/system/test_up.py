"""`slipstream up` with real processes: a run to its end, kills of every part and of all, adoption, an orderly end."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.launcher.home import Home, read_supervisor
from slipstream.launcher.stack import add_trainer, remove_trainer
from slipstream.wire.channel import TargetClient
from tests.fakes.agent_stack import Faults
from tests.fakes.local_stack import FREE_PORTS, ON_CPU, LocalStack
from tests.fakes.plain_trainer import Trainer as PlainTrainer
from tests.fakes.processes import ManagedProcess, Processes
from tests.fakes.served_model import data_spec_json, write_conversations
from tests.fakes.training import Trainer, assert_same_run

STEPS = 300
LENGTH = (f"train.max_steps={STEPS}", "checkpoint.every_steps=40", "train.packs_per_step=2")
WITHOUT_TARGET = ("--no-target", "--trainer-devices", "cpu", "--listen", "127.0.0.1:0")


@pytest.fixture
def stack(processes: Processes, tmp_path: Path) -> Iterator[LocalStack]:
    local = LocalStack(processes, tmp_path / "home")
    yield local
    local.close()


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    """Where the training processes of `faulty_stack` wait."""
    return Faults(tmp_path / "faults")


@pytest.fixture
def faulty_stack(processes: Processes, tmp_path: Path, faults: Faults) -> Iterator[LocalStack]:
    local = LocalStack(processes, tmp_path / "home", faults.environment)
    yield local
    local.close()


def run_of(stack: LocalStack, processes: Processes, recipe: Path, name: str) -> Trainer:
    return Trainer(processes, recipe, stack.home / "runs" / name)


def test_everything_is_killed_and_the_run_goes_on(
    faulty_stack: LocalStack, faults: Faults, processes: Processes, tiny_recipe: Path
) -> None:
    """Control API, target server, then all at once; the weights are those of a run that nobody disturbed."""
    stack = faulty_stack
    up = stack.up(tiny_recipe, *ON_CPU, *FREE_PORTS)
    up.wait_for_line(r"^control API +http://", timeout=90)
    up.wait_for_line("next: slipstream run create .*tiny.toml")
    stack.create_run(tiny_recipe, "undisturbed", LENGTH)
    stack.wait_for("the undisturbed run succeeds", lambda: stack.run_state("undisturbed") == "SUCCEEDED")

    # However fast this machine is, a held process trains no further than to its next checkpoint.
    for step in (40, 120, 200):
        faults.hold(step)
    stack.create_run(tiny_recipe, "disturbed", LENGTH)
    faults.wait_until_held(40)
    agent = stack.process("cpu").pid
    api = stack.kill("control-api")
    faults.let_go(40)
    # Training goes on meanwhile.
    faults.wait_until_held(120)
    stack.wait_for_another("control-api", api)
    target = stack.kill("target")
    stack.wait_for_another("target", target)
    up.wait_for_line("control-api: was killed by SIGKILL; started again")
    assert stack.process("cpu").pid == agent, "the agent noticed nothing"
    faults.let_go(120)
    faults.wait_until_held(200)
    stack.kill_everything()
    faults.let_go(200)
    disturbed = run_of(stack, processes, tiny_recipe, "disturbed")
    assert 200 <= len(disturbed.losses()) <= 240, "the run was killed before it was over"
    assert {record["incarnation"] for record in disturbed.records()} == {1, 2}, "the target was missed, nothing else"

    again = stack.up_detached()
    assert "cpu: ready" in again.output
    stack.wait_for("the disturbed run succeeds", lambda: stack.run_state("disturbed") == "SUCCEEDED")
    assert_same_run(disturbed, run_of(stack, processes, tiny_recipe, "undisturbed"))
    stored = [record["record"] for record in stack.stored_metrics("disturbed")]
    assert stored == disturbed.records(), "metrics are missing"
    stack.down()
    assert stack.alive() == []
    assert read_supervisor(stack.home) is None


def test_a_killed_supervisor_leaves_what_the_next_one_adopts(stack: LocalStack) -> None:
    first = stack.up_detached(*WITHOUT_TARGET)
    assert "dashboard    http://127.0.0.1:" in first.output
    before = stack.state
    assert before.target is None
    stack.kill_supervisor()
    assert "control-api: still alive" not in first.output
    stack.up_detached()
    after = stack.state
    assert after.pid != before.pid and after.api == before.api
    assert [one.pid for one in after.processes] == [one.pid for one in before.processes], "they were adopted"
    assert all(one.restarts == 0 for one in after.processes)
    # An adopted process is watched like any other.
    stack.wait_for_another("cpu", stack.kill("cpu"))

    stack.kill_supervisor()
    assert len(stack.alive()) >= 2
    stack.down()
    assert stack.alive() == []
    assert "nothing runs in" in stack.down().output


def test_other_settings_are_refused_while_it_is_up_and_replace_what_was_left(stack: LocalStack) -> None:
    stack.up_detached(*WITHOUT_TARGET)
    before = stack.state
    assert "already up" in stack.up_detached().output
    refused = stack.up("--detach", "--trainer-devices", "cpu,cpu")
    assert refused.wait_exit() == 18
    assert "--trainer-devices cpu,cpu" in refused.output and "slipstream down" in refused.output
    assert stack.state == before

    stack.kill_supervisor()
    stack.up_detached("--listen", "localhost:0")
    after = stack.state
    assert after.api != before.api
    assert not {one.pid for one in after.processes} & {one.pid for one in before.processes}


def test_trainers_come_and_go_and_ctrl_c_stops_all_in_order(stack: LocalStack) -> None:
    up = stack.up(*WITHOUT_TARGET)
    up.wait_for_line("Ctrl-C stops it in order", timeout=90)
    assert add_trainer(stack.home, "cpu") == "cpu-2"
    up.wait_for_line("cpu-2: ready", timeout=90)
    remove_trainer(stack.home, "cpu")
    stack.wait_for("the old one is gone", lambda: "cpu" not in {one.name for one in stack.state.processes})
    os.kill(up.pid, signal.SIGINT)
    assert up.wait_exit(timeout=60) == 0, up.output
    ends = [line for line in up.output.splitlines() if line.endswith("stops")]
    assert ends == ["cpu: no longer wanted, stops", "cpu-2: stops", "control-api: stops"]
    assert stack.alive() == [] and "Traceback" not in up.output


def test_a_target_that_cannot_load_is_given_up_and_the_rest_runs(stack: LocalStack, tmp_path: Path) -> None:
    model = tmp_path / "broken"
    model.mkdir()
    # All files are there, or it would be refused before anything starts.
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    up = stack.up("--detach", "--model", model, *ON_CPU, *FREE_PORTS)
    # It is started five times again, and imports torch each time.
    assert up.wait_exit(timeout=180) == 19, up.output + stack.logs()
    assert "target was given up" in up.output and str(stack.home / "logs" / "target.log") in up.output
    assert "Traceback" not in up.output
    state = stack.state
    assert state.state == "DEGRADED"
    assert {one.name: one.state for one in state.processes if one.name != "cpu"} == {
        "control-api": "READY",
        "target": "GAVE_UP",
    }
    stack.down()
    assert stack.alive() == []


def test_one_target_on_two_devices(stack: LocalStack, tiny_recipe: Path, tmp_path: Path) -> None:
    stack.up_detached(tiny_recipe, "--devices", "cpu,cpu", "--tensor-parallel", "2", "--trainers", "0", *FREE_PORTS)
    log = Home(stack.home).log_file("target").read_text()
    assert re.search(r"engine_started engine=engine-0 .*pids=\d+,\d+", log), log
    refused = stack.up(tiny_recipe, "--detach", "--set", "train.max_steps=7")
    assert refused.wait_exit() == 18
    assert "Asked is --set train.max_steps=7 (it has its recipe's)." in refused.output
    assert "run create RECIPE --set KEY=VALUE" in refused.output
    data = data_spec_json(write_conversations(tmp_path / "conversations.jsonl"))
    address = stack.state.target
    assert address is not None
    with TargetClient(address) as client:
        run = PlainTrainer(client, "run", data)
        run.join()
        run.train(until=2)
    assert sorted(run.packs) == [0, 1]
    stack.down()
    assert stack.alive() == []


PROGRAM = """
import sys, time
from pathlib import Path
from slipstream.launcher.planning import Wanted, plan_stack
from slipstream.launcher.running import running_stack

wanted = Wanted(no_target=True, trainer_devices=("cpu",), listen="127.0.0.1:0")
stack = plan_stack(wanted, None, working_directory=Path.cwd())
with running_stack(stack, Path(sys.argv[1])) as running:
    print("up", running.dashboard_url, flush=True)
    if sys.argv[2] == "killed":
        time.sleep(600)
print("left", flush=True)
"""


@pytest.mark.parametrize("ending", ["leave", "killed"])
def test_a_stack_inside_another_program(stack: LocalStack, tmp_path: Path, ending: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    argv = [sys.executable, "-P", str(program), str(stack.home), ending]
    with ManagedProcess(argv, env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}) as process:
        process.wait_for_line(r"up http://127.0.0.1:\d+/dashboard/", timeout=90)
        if ending == "killed":
            process.kill()
        else:
            process.wait_for_line("left", timeout=90)
            assert process.wait_exit() == 0
        stack.wait_for("nothing is left", lambda: stack.alive() == [])
