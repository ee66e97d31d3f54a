"""A control API on a real socket, with a clock that the test turns, and the command line in front of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from control_api.app import build_services, create_app
from control_api.settings import Settings
from control_api.store.database import Database
from slipstream.cli.main import run_command
from slipstream.errors import SlipstreamError
from tests.fakes.control_plane import Desk, FakeClock
from tests.fakes.http_server import serving

# Nothing but the test and the reconciler's reaction to it changes anything.
SETTINGS = Settings(reconcile_seconds=60.0, probe_seconds=60.0, probe_deadline=0.2, keep_alive_seconds=0.2)

RECIPE = """
name = "mine"
target.model = "some/model"
data.files = ["conversations.jsonl"]
data.pack_tokens = 128
train = { device = "cpu", attention = "sdpa", max_steps = 100 }
"""


@dataclass(frozen=True)
class Answer:
    """What a command printed, and how it ended."""

    status: int
    out: str
    err: str


Command = Callable[..., Answer]


@dataclass(frozen=True)
class Served:
    """The application, and where it answers."""

    app: FastAPI
    address: str


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for all tests: to start it takes longer than most tests. Each test puts its own services behind."""
    unused = Database(f"sqlite:///{tmp_path_factory.mktemp('control')}/unused.sqlite")
    app = create_app(unused, SETTINGS)
    with serving(app) as address:
        yield Served(app, address)
    unused.close()


@pytest.fixture
def desk(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """People and trainers in front of an API, which is the one that commands find."""
    clock = FakeClock()
    database = Database(f"sqlite:///{tmp_path}/control.sqlite")
    services = build_services(database, SETTINGS, clock)
    # The prober stays at rest: sooner or later it would find that the targets of these tests are not there.
    services.reconciler.start()
    served.app.state.services = services
    monkeypatch.setenv("SLIPSTREAM_API", served.address)
    with httpx2.Client(base_url=served.address, trust_env=False, timeout=60) as client:
        yield Desk(client, services, clock)
    services.feed.close()
    services.reconciler.stop()
    database.close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No stack of this machine is found."""
    for name in ("SLIPSTREAM_API", "SLIPSTREAM_TOKEN", "SLIPSTREAM_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    directory = tmp_path / "home"
    monkeypatch.setenv("SLIPSTREAM_HOME", str(directory))
    return directory


@pytest.fixture
def slipstream(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process, as its console script would."""

    def command(*arguments: str) -> Answer:
        capsys.readouterr()
        status, error = _run(arguments)
        out, err = capsys.readouterr()
        return Answer(status, out, err + error)

    return command


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """On a CPU, with its data beside it."""
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    (tmp_path / "conversations.jsonl").touch()
    return path


def _run(arguments: Sequence[Any]) -> tuple[int, str]:
    try:
        return run_command([str(one) for one in arguments]), ""
    except SlipstreamError as refused:
        return refused.exit_code, f"error: {refused.message}\n  remedy: {refused.remedy}\n"
    except SystemExit as usage:
        assert isinstance(usage.code, int)
        return usage.code, ""
