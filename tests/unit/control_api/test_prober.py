"""Visits to real gRPC servers in every mood, within the deadline."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from fastapi.testclient import TestClient

from control_api.dependencies import Services
from control_api.prober import TargetProber
from control_api.run_definition import served_sizes
from control_api.settings import Settings
from control_api.store import targets
from control_api.store.database import Database
from control_api.target_visit import Errands, visit
from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1.hidden_state_service_pb2_grpc import (
    HiddenStateServiceServicer,
    add_HiddenStateServiceServicer_to_server,
)
from slipstream.hidden_states.v1.stream_admin_service_pb2_grpc import add_StreamAdminServiceServicer_to_server
from slipstream.plan.sizes import TargetSizes
from slipstream.plan.target_sizes import sizes_of_served
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import SERVER_OPTIONS
from slipstream.wire.status import StatusInterceptor
from slipstream.wire.target_config import TargetConfig
from target_server.admin_service import StreamAdminService
from target_server.producer import Throughput
from tests.fakes.control_plane import Desk, record, report
from tests.fakes.ledger_desk import STREAM, LedgerDesk

CONFIG = TargetConfig(
    model_type="llama", num_layers=4, hidden_size=32, intermediate_size=64, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, vocab_size=96, rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=512,
    tie_word_embeddings=False, embedding_scale=2.0, logit_soft_cap=None, norm_weight_offset=0.0, tokenizer_length=90,
    mask_token_id=None, special_tokens={},
)  # fmt: skip


class Service(HiddenStateServiceServicer):
    """A target server that answers the handshake, or refuses it."""

    def __init__(self) -> None:
        self.refusal: SlipstreamError | None = None
        self.protocol_version = 1
        self.tokens: list[str] = []
        self.config = ""

    def GetTarget(self, request: pb.GetTargetRequest, context: grpc.ServicerContext) -> pb.GetTargetResponse:  # noqa: N802
        self.tokens.append(dict(context.invocation_metadata()).get("authorization", ""))
        if self.refusal is not None:
            raise self.refusal
        return pb.GetTargetResponse(
            protocol_version=self.protocol_version, model_id="m", target_fingerprint="f", server_version="1",
            target_config_json=self.config,
        )  # fmt: skip


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[LedgerDesk]:
    """What the target knows of subscriptions."""
    ledger = LedgerDesk(tmp_path / "ledger.sqlite")
    yield ledger
    ledger.close()


@pytest.fixture
def throughput() -> Throughput:
    return Throughput()


@pytest.fixture
def address(service: Service, ledger: LedgerDesk, throughput: Throughput) -> Iterator[str]:
    readiness = SimpleNamespace(target=lambda: SimpleNamespace(producer=SimpleNamespace(throughput=throughput)))
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[StatusInterceptor()], options=SERVER_OPTIONS)
    add_HiddenStateServiceServicer_to_server(service, server)
    add_StreamAdminServiceServicer_to_server(StreamAdminService(ledger.control, readiness), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(5)


def test_a_target_that_serves(service: Service, address: str) -> None:
    found = visit(address, token="secret", deadline=5.0)
    assert (found.status, found.model, found.fingerprint, found.server_version) == ("REACHABLE", "m", "f", "1")
    assert service.tokens == ["Bearer secret"]


def test_the_sizes_of_its_model_are_kept(database: Database, service: Service, address: str) -> None:
    service.config = CONFIG.canonical_json()
    prober = TargetProber(database, Settings(probe_deadline=30.0), time.time)
    with database.write() as session:
        targets.add(session, name="local", address=address, now=1.0)
    refusals = (None, SlipstreamError("not now", reason=Reason.TARGET_LOADING))
    for refusal, status in zip(refusals, ("REACHABLE", "LOADING"), strict=True):
        service.refusal = refusal
        prober.probe("local", address)
        assert known_of(database) == (status, sizes_of_served(CONFIG)), "one that loads is still that model"
    with database.write() as session:
        [row] = targets.every(session)
        row.sizes = {"hidden_size": 8}
    assert known_of(database) == ("LOADING", None), "a version that knew fewer has asked"
    service.refusal, service.config = None, '{"model_type": "of another version"}'
    prober.probe("local", address)
    assert known_of(database) == ("REACHABLE", None)


def known_of(database: Database) -> tuple[str, TargetSizes | None]:
    """Status and sizes of the target."""
    with database.read() as session:
        [row] = targets.every(session)
        return row.status, served_sizes(row)


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
    found = visit(address, token=None, deadline=5.0)
    assert found.status == status
    assert found.detail


def test_a_target_of_another_version(service: Service, address: str) -> None:
    service.protocol_version = 9
    found = visit(address, token=None, deadline=5.0)
    assert found.status == "INCOMPATIBLE"
    assert "speaks protocol 9" in found.detail


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        found = visit(f"127.0.0.1:{bound.getsockname()[1]}", token=None, deadline=5.0)
    assert found.status == "UNREACHABLE"


def test_who_never_answers_is_left_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        began = time.monotonic()
        found = visit(f"127.0.0.1:{silent.getsockname()[1]}", token=None, deadline=0.3)
    assert found.status == "UNREACHABLE"
    assert time.monotonic() - began < 5.0


def test_an_address_that_is_none() -> None:
    assert visit("nowhere", token=None, deadline=0.3).status == "INCOMPATIBLE"


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


def is_closed(ledger: LedgerDesk, name: str) -> bool:
    return name not in ledger.book.subscriptions


def test_errands_are_done_as_far_as_they_can_be(ledger: LedgerDesk, address: str) -> None:
    kept, gone = ledger.open("kept"), ledger.open("gone")
    errands = Errands(close=["subscriptions/never", gone], measure=["subscriptions/never", kept, gone])
    for _ in range(2):
        found = visit(address, errands, token=None, deadline=30.0)
        assert (found.status, found.closed, set(found.stats)) == (
            "REACHABLE",
            {gone, "subscriptions/never"},
            {kept},
        )
    assert is_closed(ledger, gone)
    assert not is_closed(ledger, kept)


def test_an_older_server_serves_nevertheless(service: Service) -> None:
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[StatusInterceptor()], options=SERVER_OPTIONS)
    add_HiddenStateServiceServicer_to_server(service, server)  # and no admin service
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    found = visit(f"127.0.0.1:{port}", Errands(["a"], ["b"]), token=None, deadline=30.0)
    server.stop(0).wait(30)
    assert (found.status, found.closed, dict(found.stats)) == ("REACHABLE", frozenset(), {})


@pytest.fixture
def at_work(desk: Desk, services: Services, address: str) -> int:
    """The run `demo` in RUNNING on the target; the id of its assignment."""
    desk.post("/v1/targets", {"name": "local", "address": address}, status=201)
    return desk.running()


def end_and_delete(desk: Desk, client: TestClient, work: int) -> None:
    desk.beat("t1", report(work, "SUCCEEDED"))
    assert client.delete("/v1/runs/demo").status_code == 204


def test_a_deleted_run_is_closed_at_its_target(
    at_work: int, desk: Desk, client: TestClient, services: Services, ledger: LedgerDesk
) -> None:
    name, other = ledger.open("demo"), ledger.open("another")
    services.prober.probe_all()
    assert not is_closed(ledger, name)
    end_and_delete(desk, client, at_work)
    again = desk.run()["directory"]
    desk.reconcile()
    anew = ledger.open(again)
    services.prober.probe_all()
    assert is_closed(ledger, name)
    assert not is_closed(ledger, other)
    assert not is_closed(ledger, anew), "a new run of the same name reads under another one"
    reopened = ledger.open("demo")  # by somebody without a control plane
    services.prober.probe_all()
    assert not is_closed(ledger, reopened), "it is closed once"


def test_a_target_that_is_away_is_told_when_it_is_back(
    at_work: int, desk: Desk, client: TestClient, services: Services, service: Service, ledger: LedgerDesk
) -> None:
    name = ledger.open("demo")
    end_and_delete(desk, client, at_work)
    service.refusal = SlipstreamError("not now", reason=Reason.TARGET_LOADING)
    services.prober.probe_all()
    assert not is_closed(ledger, name)
    service.refusal = None
    another = TargetProber(services.database, Settings(), desk.clock)  # another process of the control plane
    another.probe_all()
    assert is_closed(ledger, name)


def test_a_deleted_target_is_told_nothing(
    at_work: int, desk: Desk, client: TestClient, services: Services, ledger: LedgerDesk, address: str
) -> None:
    name = ledger.open("demo")
    end_and_delete(desk, client, at_work)
    assert client.delete("/v1/targets/local").status_code == 204
    desk.post("/v1/targets", {"name": "local", "address": address}, status=201)
    services.prober.probe_all()
    assert not is_closed(ledger, name)


def test_every_target_that_a_run_was_on_is_told(
    at_work: int, desk: Desk, client: TestClient, services: Services, ledger: LedgerDesk
) -> None:
    name = ledger.open("demo")
    desk.verb("stop")
    desk.beat("t1", report(at_work, "STOPPED"))
    desk.target("other")
    assert client.patch("/v1/runs/demo", json={"target": "other"}).status_code == 200
    services.prober.probe_all()
    assert not is_closed(ledger, name), "the run may come back"
    assert client.delete("/v1/runs/demo").status_code == 204
    services.prober.probe_all()
    assert is_closed(ledger, name)


def test_a_runs_pace_and_what_decides_it(
    at_work: int, desk: Desk, services: Services, ledger: LedgerDesk, throughput: Throughput
) -> None:
    def seen() -> tuple[float | None, str | None]:
        services.prober.probe_all()
        found = desk.get("runs/demo")["throughput"]
        return found["target_tokens_per_second"], found["bottleneck"]

    starved = [record(step) | {"data_wait_seconds": 0.4} for step in range(3)]
    desk.beat("t1", report(at_work, "RUNNING", metrics={"first_index": 0, "records": starved}))
    assert seen() == (None, None), "the trainer has not subscribed yet"
    name, incarnation = ledger.join("demo")
    ledger.ask(name, incarnation)
    assert seen() == (None, None), "a first look gives no share"
    for _ in range(3):
        throughput.note(STREAM, 128)
    ledger.book.subscriptions[name].begin_wait(ledger.now)
    ledger.pass_time(6.0)
    speed, decides = seen()
    assert speed is not None
    assert speed > 0
    assert decides == "TARGET", "it waited there all the time"
    ledger.book.subscriptions[name].end_wait(ledger.now)
    ledger.pass_time(3.0)
    assert seen()[1] == "TARGET", "too early for another look"
    ledger.pass_time(3.0)
    assert seen()[1] == "WIRE"
    fast = [record(step) | {"data_wait_seconds": 0.0} for step in range(3, 30)]
    desk.beat("t1", report(at_work, "RUNNING", metrics={"first_index": 3, "records": fast}))
    assert seen()[1] == "TRAINER"
    desk.beat("t1", report(at_work, "STOPPED"), leaving=True)
    desk.trainer("t2")
    desk.reconcile()
    assert desk.get("runs/demo")["throughput"]["target_tokens_per_second"] is None, "another attempt, not measured yet"
