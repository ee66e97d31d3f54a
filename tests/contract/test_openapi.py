"""The OpenAPI document holds: whatever is sent, the answer is one that is documented, and never a 500."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from control_api.app import create_app
from control_api.routes import exports, health, recipes, records, runs, trainers
from control_api.routes import targets as targets_routes
from control_api.settings import Settings
from control_api.store import targets
from control_api.store.database import Database
from control_api.store.tables import Trainer
from tests.fakes.control_plane import registration
from tests.fakes.http_server import serving

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The document of a server that runs, with names in its database that generated requests can hit."""
    folder: Path = tmp_path_factory.mktemp("openapi")
    database = Database(f"sqlite:///{folder / 'control.sqlite'}")
    with database.write() as session:
        targets.add(session, name="0", address="127.0.0.1:1", now=0.0)
        fields = registration("0") | {"instance_id": "0", "versions": {}, "registered_at": 0.0, "last_seen_at": 0.0}
        session.add(Trainer(**fields))
    # No request waits long for a target that is not there.
    with serving(create_app(database, Settings(probe_deadline=0.2))) as address:
        yield schemathesis.openapi.from_url(f"{address}/openapi.json")
    database.close()


# Streams never end; tests/unit/control_api/test_feed.py reads them.
STREAMS = {"stream_events", "stream_logs"}
OPERATIONS = [
    str(route.operation_id)
    for module in (exports, health, recipes, records, runs, targets_routes, trainers)
    for route in module.router.routes
    if isinstance(route, APIRoute) and route.operation_id not in STREAMS
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_answer_is_documented(document: Any, operation: str) -> None:
    cases = st.one_of(
        document.find_operation_by_id(operation).as_strategy(generation_mode=mode) for mode in GenerationMode
    )

    @given(case=cases)
    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    def answer(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    answer()


def test_operations_have_stable_ids(document: Any) -> None:
    found = {one.ok().definition.raw["operationId"] for one in document.get_all_operations()}
    assert found == {*OPERATIONS, *STREAMS}
    assert len(OPERATIONS) == 32
