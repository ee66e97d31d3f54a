"""A control API on a database of its own, with a clock that the test turns and no thread but the test's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from control_api.app import create_app
from control_api.dependencies import Services
from control_api.settings import Settings
from control_api.store.database import Database
from tests.fakes.control_plane import Desk, FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(f"sqlite:///{tmp_path}/control.sqlite", busy_seconds=0.1)
    yield opened
    opened.close()


@pytest.fixture
def settings() -> Settings:
    return Settings()


@pytest.fixture
def client(database: Database, settings: Settings, clock: FakeClock) -> TestClient:
    # Not entered: the lifespan would start the threads, and the test reconciles by itself.
    return TestClient(create_app(database, settings, clock=clock), raise_server_exceptions=False)


@pytest.fixture
def services(client: TestClient) -> Services:
    found: Any = client.app
    assert isinstance(found.state.services, Services)
    return found.state.services


@pytest.fixture
def desk(client: TestClient, services: Services, clock: FakeClock) -> Desk:
    return Desk(client, services, clock)
