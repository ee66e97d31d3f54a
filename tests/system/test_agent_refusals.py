"""An agent that the control API does not want says why and leaves; no traceback, and no training process stays."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_api.app import create_app
from control_api.settings import Settings
from control_api.store.database import Database
from control_api.store.trainers import find
from slipstream.control_client import ControlClient
from tests.fakes.http_server import serving
from tests.fakes.processes import ManagedProcess, Processes

TOKEN = "correct-horse"


class Api:
    """A control API in this process, for agents in others."""

    def __init__(self, address: str, database: Database, processes: Processes, directory: Path) -> None:
        self.address = address
        self.database = database
        self._processes = processes
        self._directory = directory

    def agent(self, name: str = "t1", *flags: str, state: str = "state", token: str = TOKEN) -> ManagedProcess:
        places = ["--runs", self._directory / "runs", "--state", self._directory / state]
        return self._processes.start(
            *("drafter_trainer", "worker", "--api", self.address, "--name", name, "--device", "cpu", *places, *flags),
            env={"SLIPSTREAM_TOKEN": token},
        )


@pytest.fixture
def trainer_timeout() -> float:
    """Seconds after which a silent agent is lost; long, so that a busy machine loses none."""
    return 60.0


@pytest.fixture
def api(tmp_path: Path, processes: Processes, trainer_timeout: float) -> Iterator[Api]:
    database = Database(f"sqlite:///{tmp_path / 'control.sqlite'}")
    settings = Settings(token=TOKEN, trainer_timeout=trainer_timeout, heartbeat_seconds=0.3)
    with serving(create_app(database, settings)) as address:
        yield Api(address, database, processes, tmp_path)
        processes.close()
    database.close()


def refused(agent: ManagedProcess, words: str) -> None:
    assert agent.wait_exit() != 0, agent.output
    assert agent.lines[-1].startswith("  remedy: ") or "error: " in agent.lines[-1]
    assert words in agent.output and "Traceback" not in agent.output and "crash" not in agent.output


def test_wrong_token_and_foreign_name(api: Api) -> None:
    refused(api.agent(token="wrong"), "token")
    first = api.agent()
    first.wait_for_line("registered name=t1")
    refused(api.agent(state="another"), "belongs to another trainer")
    first.terminate()
    assert first.wait_exit() == 0, first.output
    assert "told_the_api=true" in first.output
    with ControlClient(api.address, TOKEN) as client:
        assert client.get("/v1/trainers/t1")["status"] == "STOPPED"
    heir = api.agent(state="another")
    heir.wait_for_line("registered name=t1")


def test_a_control_api_of_another_version(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_api.routes.trainers.TRAINER_PROTOCOL_VERSION", 2)
    refused(api.agent(), "speaks protocol 1, this server speaks 2")


@pytest.mark.parametrize("trainer_timeout", [1.0])
def test_a_name_that_was_taken_while_it_was_silent(api: Api) -> None:
    silent = api.agent()
    silent.wait_for_line("registered name=t1")
    os.kill(silent.pid, signal.SIGSTOP)
    # Until it counts as lost, the name is refused.
    while True:
        successor = api.agent(state="another")
        try:
            successor.wait_for_line("registered name=t1")
        except AssertionError:
            assert "belongs to another trainer" in successor.output
            continue
        break
    os.kill(silent.pid, signal.SIGCONT)
    refused(silent, "belongs to another trainer")
    successor.terminate()
    assert successor.wait_exit() == 0, successor.output


def test_a_control_api_that_has_forgotten_it(api: Api) -> None:
    agent = api.agent()
    agent.wait_for_line("registered name=t1")
    seen = len(agent.lines)
    with api.database.write() as session:
        session.delete(find(session, "t1"))
    agent.wait_for_line("trainer_unknown", start=seen)
    agent.wait_for_line("registered name=t1", start=seen)
    agent.terminate()
    assert agent.wait_exit() == 0, agent.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--name", "T 1"], "--name is 'T 1'"),
        (["--api", "ftp://nowhere"], "is no address of a control API"),
        (["--runs", "/proc/runs"], "could not be written"),
    ],
)
def test_flags_that_cannot_be(api: Api, flags: list[str], words: str) -> None:
    refused(api.agent("t1", *flags), words)


def test_it_waits_for_a_control_api_that_is_not_there_yet(processes: Processes, tmp_path: Path) -> None:
    places = ["--runs", tmp_path / "runs", "--state", tmp_path / "state"]
    agent = processes.start(
        "drafter_trainer", "worker", "--api", "127.0.0.1:9", "--name", "t1", "--device", "cpu", *places
    )
    agent.wait_for_line("control_api_does_not_answer")
    agent.terminate()
    assert agent.wait_exit(timeout=60) == 0
    assert "told_the_api=false" in agent.output
