"""Asking real gRPC servers in every mood, within the deadline."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from control_api.prober import TargetProber, ask
from control_api.settings import Settings
from control_api.store import targets
from control_api.store.database import Database
from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1.hidden_state_service_pb2_grpc import (
    HiddenStateServiceServicer,
    add_HiddenStateServiceServicer_to_server,
)
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import SERVER_OPTIONS
from slipstream.wire.status import StatusInterceptor


class Service(HiddenStateServiceServicer):
    """A target server that answers the handshake, or refuses it."""

    def __init__(self) -> None:
        self.refusal: SlipstreamError | None = None
        self.protocol_version = 1
        self.tokens: list[str] = []

    def GetTarget(self, request: pb.GetTargetRequest, context: grpc.ServicerContext) -> pb.GetTargetResponse:  # noqa: N802
        self.tokens.append(dict(context.invocation_metadata()).get("authorization", ""))
        if self.refusal is not None:
            raise self.refusal
        return pb.GetTargetResponse(
            protocol_version=self.protocol_version, model_id="m", target_fingerprint="f", server_version="1"
        )


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def address(service: Service) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[StatusInterceptor()], options=SERVER_OPTIONS)
    add_HiddenStateServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(5)


def test_a_target_that_serves(service: Service, address: str) -> None:
    found = ask(address, token="secret", deadline=5.0)
    assert (found.status, found.model, found.fingerprint, found.server_version) == ("REACHABLE", "m", "f", "1")
    assert service.tokens == ["Bearer secret"]


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (Reason.TARGET_LOADING, "LOADING"),
        (Reason.TARGET_DRAINING, "DRAINING"),
        (Reason.ACCESS_DENIED, "INCOMPATIBLE"),
        (Reason.INTERNAL, "INCOMPATIBLE"),
    ],
)
def test_a_target_that_refuses(service: Service, address: str, reason: Reason, status: str) -> None:
    service.refusal = SlipstreamError("not now", reason=reason)
    found = ask(address, token=None, deadline=5.0)
    assert found.status == status
    assert found.detail


def test_a_target_of_another_version(service: Service, address: str) -> None:
    service.protocol_version = 9
    found = ask(address, token=None, deadline=5.0)
    assert found.status == "INCOMPATIBLE"
    assert "speaks protocol 9" in found.detail


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        found = ask(f"127.0.0.1:{bound.getsockname()[1]}", token=None, deadline=5.0)
    assert found.status == "UNREACHABLE"


def test_who_never_answers_is_left_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        began = time.monotonic()
        found = ask(f"127.0.0.1:{silent.getsockname()[1]}", token=None, deadline=0.3)
    assert found.status == "UNREACHABLE"
    assert time.monotonic() - began < 5.0


def test_an_address_that_is_none() -> None:
    assert ask("nowhere", token=None, deadline=0.3).status == "INCOMPATIBLE"


def test_the_thread_notices_a_target_that_comes_and_goes(database: Database, service: Service, address: str) -> None:
    news: list[threading.Event] = [threading.Event(), threading.Event()]
    heard = iter(news)
    prober = TargetProber(database, Settings(probe_seconds=0.05), time.time)
    prober.add_listener(lambda: next(heard).set())
    with database.write() as session:
        targets.add(session, name="local", address=address, now=1.0)
    prober.start()
    assert news[0].wait(10)
    service.refusal = SlipstreamError("not now", reason=Reason.TARGET_LOADING)
    assert news[1].wait(10)
    prober.stop()
    assert not prober.is_alive
    with database.read() as session:
        row = targets.find(session, "local")
        assert row is not None
        assert (row.status, row.model) == ("LOADING", "m"), "a target that is away is still the model it was"
