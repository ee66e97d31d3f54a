"""A control API, a target server and trainer agents as processes, and faults in the training processes they start."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slipstream.control_client import ControlClient
from slipstream.run_spec.load import load_recipe
from tests.fakes.processes import ADDRESS, ManagedProcess, Processes, import_path

_HOOKS = Path(__file__).parent / "fault_hooks"


class Faults:
    """What training processes are to suffer, step by step; see `fault_hooks/sitecustomize.py`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.environment = {
            "SLIPSTREAM_TEST_FAULTS": str(directory),
            "PYTHONPATH": import_path(_HOOKS),
        }

    def kill(self, *steps: int | str) -> None:
        """The process that is about to save the checkpoint of such a step is killed, once."""
        for step in steps:
            (self._directory / f"kill-{step}").touch()

    def hold(self, step: int) -> None:
        """The process that is about to save this checkpoint waits."""
        (self._directory / f"hold-{step}").touch()

    def let_go(self, step: int) -> None:
        """It goes on."""
        (self._directory / f"hold-{step}").unlink()

    def wait_until_held(self, step: int, *, seconds: float = 90.0) -> None:
        """Until a process waits there."""
        deadline = time.monotonic() + seconds
        while not (self._directory / f"at-{step}").exists():
            assert time.monotonic() < deadline, f"no training process reached step {step} within {seconds:.0f} s"
            time.sleep(0.02)


class Stack:
    """One control API with one target; agents come and go."""

    def __init__(self, processes: Processes, recipe: Path, target: str, directory: Path) -> None:
        self.processes = processes
        self.directory = directory
        self.faults = Faults(directory / "faults")
        self._recipe = recipe
        self._database = directory / "control.sqlite"
        self.api = self.start_api()
        self.client = ControlClient(self.address)
        self.client.post("/v1/targets", {"name": "local", "address": target})

    def start_api(self, port: int = 0) -> ManagedProcess:
        """Also again, at the port it had."""
        # Agents that hear soon what is wanted: a test waits for that again and again.
        flags = ("--database", f"sqlite:///{self._database}", "--heartbeat-seconds", "0.3")
        api = self.processes.start("control_api.cli", "--listen", f"127.0.0.1:{port}", *flags)
        self.address = api.wait_for_line(ADDRESS).group(1)
        return api

    def restart_api(self) -> None:
        """After it was killed."""
        self.api = self.start_api(int(self.address.rpartition(":")[2]))

    def start_agent(self, name: str = "t1", *arguments: str, mebibytes: int | None = None) -> ManagedProcess:
        """Once it is known to the control API; all share the directory of runs.

        Args:
            name: of the trainer.
            arguments: of its process, besides.
            mebibytes: of memory in its container; None: it is in none.
        """
        container = {} if mebibytes is None else {"SLIPSTREAM_TEST_CGROUP": self._container(name, mebibytes)}
        agent = self.start_worker(name, *arguments, env=container)
        agent.wait_for_line(f"registered name={name}")
        return agent

    def start_worker(self, name: str, *arguments: str, env: Mapping[str, str] = MappingProxyType({})) -> ManagedProcess:
        """The process."""
        flags = ["--api", f"http://{self.address}", "--name", name, "--device", "cpu", "--threads", "1"]
        places = ["--runs", self.directory / "runs", "--state", self.directory / f"state-{name}"]
        environment = self.faults.environment | dict(env)
        return self.processes.start("drafter_trainer", "worker", *flags, *places, *arguments, env=environment)

    def _container(self, name: str, mebibytes: int) -> str:
        group = self.directory / f"cgroup-{name}"
        group.mkdir(exist_ok=True)
        for file, value in (("memory.max", mebibytes << 20), ("memory.current", 0)):
            (group / file).write_text(f"{value}\n")
        return str(group)

    def create(self, name: str, *overrides: str) -> None:
        """A run of the tiny recipe."""
        spec = load_recipe(self._recipe, [f"name={name}", *overrides]).spec.model_dump(mode="json")
        self.client.post("/v1/runs", {"target": "local", "spec": spec})

    def verb(self, run: str, verb: str) -> None:
        """pause, resume or stop."""
        self.client.post(f"/v1/runs/{run}:{verb}")

    def state(self, run: str) -> str:
        """Of the run, as the control API has it."""
        return str(self.client.get(f"/v1/runs/{run}")["state"])

    def steps(self, run: str) -> list[int]:
        """Of all metrics that the control API has stored, in their order."""
        return [record["step"] for record in self.client.listing(f"/v1/runs/{run}/metrics")]

    def events(self, run: str, kind: str) -> list[dict[str, Any]]:
        """Those of one type."""
        return [one for one in self.client.listing(f"/v1/runs/{run}/events") if one["type"] == kind]

    def close(self) -> None:
        """Connections; the processes are others' to end."""
        self.client.close()


@contextmanager
def agent_stack(processes: Processes, recipe: Path, target: str, directory: Path) -> Iterator[Stack]:
    """A stack without agents."""
    stack = Stack(processes, recipe, target, directory)
    try:
        yield stack
    finally:
        stack.close()
