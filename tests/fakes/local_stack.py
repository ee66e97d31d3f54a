"""A local stack under test: `slipstream up` and `slipstream down` as a person types them, and a hand that kills."""

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from slipstream.control_client import ControlApiUnreachableError, ControlClient
from slipstream.launcher.home import Home, ProcessStatus, SupervisorState, read_supervisor
from slipstream.launcher.liveness import holders, marked, open_handles
from slipstream.run_spec.load import load_recipe
from tests.fakes.processes import ManagedProcess, Processes
from tests.fakes.training import read_last_records

ON_CPU = ("--devices", "cpu", "--trainer-devices", "cpu")
FREE_PORTS = ("--listen", "127.0.0.1:0", "--target-listen", "127.0.0.1:0")
_SECONDS = 90.0

T = TypeVar("T")


class LocalStack:
    """One home. Every wait has a deadline, and says what it saw when that has passed."""

    def __init__(self, processes: Processes, home: Path, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: of every process, besides this one's."""
        self._processes = processes
        self._environment = dict(environment or {})
        self.home = home

    def up(self, *arguments: str | Path) -> ManagedProcess:
        """`slipstream up --home HOME …`"""
        # A GPU would be another test.
        env = {"CUDA_VISIBLE_DEVICES": "", "SLIPSTREAM_TOKEN": "", **self._environment}
        return self._processes.start("slipstream.cli", "up", "--home", self.home, *arguments, env=env)

    def up_detached(self, *arguments: str | Path) -> ManagedProcess:
        """The same with --detach, once it has returned in order."""
        process = self.up("--detach", *arguments)
        assert process.wait_exit(timeout=_SECONDS) == 0, process.output + self.logs()
        return process

    def down(self) -> ManagedProcess:
        """`slipstream down`, once it has returned in order."""
        process = self._processes.start("slipstream.cli", "down", "--home", self.home)
        assert process.wait_exit(timeout=_SECONDS) == 0, process.output + self.logs()
        return process

    @property
    def state(self) -> SupervisorState:
        """What supervisor.json says."""
        found = read_supervisor(self.home)
        assert found is not None, "no stack is up"
        return found

    def process(self, name: str) -> ProcessStatus:
        """One process of it."""
        return next(one for one in self.state.processes if one.name == name)

    def wait_for(self, what: str, is_so: Callable[[], Any], seconds: float = _SECONDS) -> Any:
        """The first true answer."""
        deadline = time.monotonic() + seconds
        while not (answer := is_so()):
            assert time.monotonic() < deadline, f"{seconds:.0f} s without: {what}\n{self.logs()}"
            time.sleep(0.02)
        return answer

    def wait_until_ready(self) -> SupervisorState:
        """Once supervisor.json says so."""
        found = self.wait_for(
            "everything is ready", lambda: (s := read_supervisor(self.home)) and s.state == "READY" and s
        )
        assert isinstance(found, SupervisorState)
        return found

    def kill(self, name: str) -> ProcessStatus:
        """SIGKILL a process; what was known of it."""
        killed = self.process(name)
        assert killed.pid is not None
        self._kill_all([killed.pid])
        return killed

    def wait_for_another(self, name: str, killed: ProcessStatus) -> None:
        """Until the supervisor has started it again, and it does its work."""
        self.wait_for(
            f"{name} is started again",
            lambda: (now := self.process(name)).state == "READY" and now.restarts == killed.restarts + 1,
        )
        assert self.process(name).pid != killed.pid

    def kill_supervisor(self) -> None:
        """SIGKILL; the others live on."""
        self._kill_all([self.state.pid])

    def kill_everything(self) -> None:
        """SIGKILL, for the supervisor first: it starts nobody again."""
        self.kill_supervisor()
        while alive := marked(Home(self.home).root):
            self._kill_all(alive)

    def alive(self) -> list[int]:
        """Ids of everything that belongs to the home."""
        return [*marked(Home(self.home).root), *holders(Home(self.home).supervisor_lock)]

    def create_run(self, recipe: Path, name: str, overrides: tuple[str, ...] = ()) -> None:
        """A run, over REST."""
        spec = load_recipe(recipe, [f"name={name}", *overrides]).spec
        self.ask(lambda client: client.post("/v1/runs", {"spec": spec.model_dump(mode="json")}))

    def run_state(self, name: str) -> str:
        """As the API says; empty while it does not answer."""
        try:
            return str(self.ask(lambda client: client.get(f"/v1/runs/{name}"))["state"])
        except ControlApiUnreachableError:
            return ""

    def stored_metrics(self, name: str) -> list[Mapping[str, Any]]:
        """Every record that the API has."""
        return self.ask(lambda client: list(client.listing(f"/v1/runs/{name}/metrics")))

    def steps_of(self, name: str) -> int:
        """Steps that the run has recorded on disk."""
        metrics = self.home / "runs" / name / "metrics.jsonl"
        return max(read_last_records(metrics), default=-1) + 1 if metrics.exists() else 0

    def ask(self, question: Callable[[ControlClient], T]) -> T:
        """With a client of the stack's API."""
        with ControlClient(self.state.api) as client:
            return question(client)

    def logs(self) -> str:
        """The end of every log, for a test that fails."""
        files = sorted(self.home.rglob("*.log"))
        return "".join(f"\n== {file}\n" + "".join(file.read_text("utf-8").splitlines(True)[-25:]) for file in files)

    def close(self) -> None:
        """Whatever is left is killed."""
        while alive := self.alive():
            self._kill_all(alive)

    def _kill_all(self, pids: list[int]) -> None:
        for handle in open_handles(pids):
            handle.send(signal.SIGKILL)
            assert handle.has_ended(_SECONDS)
            handle.close()
