"""A run from its creation to its deletion, typed at the command line, trained by a real agent."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.fakes.agent_stack import agent_stack
from tests.fakes.processes import Processes


def test_a_run_of_the_real_agent(processes: Processes, tiny_recipe: Path, target_address: str, tmp_path: Path) -> None:
    """create, pause, resume, watch, logs, delete: none of them to a fake."""
    with agent_stack(processes, tiny_recipe, target_address, tmp_path) as stack:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "SLIPSTREAM_API": stack.address,
            "SLIPSTREAM_HOME": str(tmp_path / "home"),
        }

        def slipstream(*arguments: str | Path, status: int = 0) -> str:
            command = [sys.executable, "-m", "slipstream.cli", *map(str, arguments)]
            finished = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=120, check=False
            )
            assert finished.returncode == status, (arguments, finished.stdout, finished.stderr)
            assert "Traceback" not in finished.stderr
            return finished.stdout

        create = ("run", "create", tiny_recipe, "--name", "typed", "--set", "train.max_steps=40")
        assert slipstream(*create) == "typed PENDING on target local\n"
        places = ("--runs", tmp_path / "runs", "--state", tmp_path / "state")
        flags = ("--foreground", "--name", "hand", "--device", "cpu", *places)
        stack.faults.hold(10)
        agent = processes.start(
            "slipstream.cli", "trainer", "start", *flags, env={**stack.faults.environment, **_own(environment)}
        )
        agent.wait_for_line("registered name=hand")
        stack.faults.wait_until_held(10)
        slipstream("run", "pause", "typed")
        # Else it might train to its end before its agent hears of that.
        agent.wait_for_line("child_asked_to_leave", timeout=60)
        stack.faults.let_go(10)
        assert slipstream("run", "pause", "typed", "--wait") == "typed PAUSED\n"
        saved = json.loads(slipstream("checkpoint", "ls", "typed", "-o", "json"))["checkpoints"]
        assert saved and all(Path(one["path"]).is_dir() for one in saved)
        assert "hand" in slipstream("trainer", "ls")
        slipstream("run", "delete", "typed", status=14)
        slipstream("run", "resume", "typed")
        assert "typed SUCCEEDED" in slipstream("run", "watch", "typed")
        assert slipstream("run", "logs", "typed", "--tail", "5").count("\n") == 5
        assert "SUCCEEDED (FINISHED)" in slipstream("run", "events", "typed")
        agent.terminate()
        assert agent.wait_exit(timeout=60) == 0
        assert "is forgotten" in slipstream("run", "delete", "typed")


def _own(environment: dict[str, str]) -> dict[str, str]:
    """What leads to the stack."""
    return {name: environment[name] for name in ("SLIPSTREAM_API", "SLIPSTREAM_HOME")}
