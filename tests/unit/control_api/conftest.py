"""A control API on a database of its own, with a clock that the test turns and no thread but the test's."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI
from fastapi.testclient import TestClient

from control_api.app import build_services, create_app
from control_api.dependencies import Services
from control_api.settings import Settings
from control_api.store.database import Database
from tests.fakes.control_plane import Desk, FakeClock

BASE_URL = "http://127.0.0.1:8080"
"""Without a token, a server answers to no other names."""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a database that holds nothing: to make its tables takes longer than many a test."""
    path = tmp_path_factory.mktemp("control") / "empty.sqlite"
    Database(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def database(tmp_path: Path, empty_database: Path) -> Iterator[Database]:
    shutil.copy(empty_database, tmp_path / "control.sqlite")
    opened = Database(f"sqlite:///{tmp_path}/control.sqlite", busy_seconds=0.1)
    yield opened
    opened.close()


@pytest.fixture
def settings() -> Settings:
    return Settings()


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """One event loop for all requests; a client of its own would start one for each."""
    with start_blocking_portal() as started:
        yield started


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """One for all tests: building the routes takes longer than most tests. Each test puts its own services behind."""
    unused = Database(f"sqlite:///{tmp_path_factory.mktemp('control')}/unused.sqlite")
    yield create_app(unused, Settings())
    unused.close()


@pytest.fixture
def services(app: FastAPI, database: Database, settings: Settings, clock: FakeClock) -> Services:
    app.state.services = build_services(database, settings, clock)
    return app.state.services


@pytest.fixture
def client(app: FastAPI, services: Services, portal: BlockingPortal) -> TestClient:
    # Not entered: the lifespan would start the threads, and the test reconciles by itself.
    client = TestClient(app, BASE_URL, raise_server_exceptions=False)
    client.portal = portal
    return client


@pytest.fixture
def desk(client: TestClient, services: Services, clock: FakeClock) -> Desk:
    return Desk(client, services, clock)
