"""Health checks of the containers, run as they are there, against real servers in the states that matter."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from control_api.app import create_app
from control_api.settings import Settings
from control_api.store.database import Database
from slipstream.control_client import ControlClient
from tests.architecture.sources import ROOT
from tests.fakes.control_plane import FakeClock, registration
from tests.fakes.http_server import serving

NOBODY = "127.0.0.1:1"


def check(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status, and what was said."""
    command = [sys.executable, "-P", str(ROOT / "deploy/health.py"), *arguments]
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def api(tmp_path: Path, clock: FakeClock) -> Iterator[str]:
    database = Database(f"sqlite:///{tmp_path}/control.sqlite")
    app = create_app(database, Settings(token="secret"), clock=clock)
    clock.on_tick = app.state.services.reconciler.reconcile
    with serving(app) as address:
        yield address
    database.close()


def test_control_api(api: str) -> None:
    assert check("api", api.removeprefix("http://")) == (0, "")
    status, said = check("api", NOBODY)
    assert status == 1 and "refused" in said


def test_target() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    states = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    states.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    status, said = check("target", address)
    assert status == 1 and "NOT_SERVING" in said
    states.set("", health_pb2.HealthCheckResponse.SERVING)
    assert check("target", address) == (0, "")
    server.stop(None).wait(20)
    assert check("target", address)[0] == 1


def test_trainer(api: str, clock: FakeClock, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    environment = {"SLIPSTREAM_API": api, "SLIPSTREAM_TOKEN": "", "SLIPSTREAM_TOKEN_FILE": str(token)}
    status, said = check("trainer", "gpu5", **environment)
    assert status == 1 and "gpu5" in said
    with ControlClient(api, "secret") as client:
        client.post("/v1/trainers", registration("gpu5"))
    assert check("trainer", "gpu5", **environment) == (0, "")
    clock.forward(60)
    status, said = check("trainer", "gpu5", **environment)
    assert status == 1 and "heard from it last" in said


def test_wrong_usage_is_explained() -> None:
    status, said = check("trainer")
    assert status == 1 and "health.py target" in said
