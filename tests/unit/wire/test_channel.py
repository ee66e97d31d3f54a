"""The client waits for an absent target, tells so, notices restarts, and stops when asked."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import pytest

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1.hidden_state_service_pb2_grpc import (
    HiddenStateServiceServicer,
    add_HiddenStateServiceServicer_to_server,
)
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import SERVER_OPTIONS, Backoff, TargetClient, WaitInterruptedError
from slipstream.wire.status import StatusInterceptor


@dataclass
class Service(HiddenStateServiceServicer):
    """Answers from a script: exceptions are raised, once each, before the first answer."""

    failures: list[SlipstreamError] = field(default_factory=list)
    protocol_version: int = 1
    requests: list[object] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    entered: threading.Event = field(default_factory=threading.Event)
    hold: threading.Event | None = None
    cancels: int = 0
    """So many calls are ended as `grpc.Server.stop` ends them."""
    seconds_left: list[float] = field(default_factory=list)
    """Until the deadline of every call."""

    def _next(self, request: object, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.seconds_left.append(context.time_remaining())
        self.entered.set()
        if self.cancels:
            self.cancels -= 1
            context.abort(grpc.StatusCode.CANCELLED, "Server shutting down")
        if self.hold is not None:
            self.hold.wait(10)
        if self.failures:
            raise self.failures.pop(0)

    def GetTarget(self, request: pb.GetTargetRequest, context: grpc.ServicerContext) -> pb.GetTargetResponse:  # noqa: N802
        self._next(request, context)
        return pb.GetTargetResponse(protocol_version=self.protocol_version, model_id="m")

    def SeekSubscription(  # noqa: N802
        self, request: pb.SeekSubscriptionRequest, context: grpc.ServicerContext
    ) -> pb.SeekSubscriptionResponse:
        self._next(request, context)
        return pb.SeekSubscriptionResponse(incarnation=5)

    def ReleaseLeases(  # noqa: N802
        self, request: pb.ReleaseLeasesRequest, context: grpc.ServicerContext
    ) -> pb.ReleaseLeasesResponse:
        self._next(request, context)
        return pb.ReleaseLeasesResponse()

    def LeasePacks(self, request: pb.LeasePacksRequest, context: grpc.ServicerContext) -> pb.LeasePacksResponse:  # noqa: N802
        self._next(request, context)
        return pb.LeasePacksResponse()


Start = Callable[..., tuple[grpc.Server, str]]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[grpc.Server] = []

    def start_server(service: Service, address: str = "127.0.0.1:0") -> tuple[grpc.Server, str]:
        server = grpc.server(ThreadPoolExecutor(4), interceptors=[StatusInterceptor()], options=SERVER_OPTIONS)
        add_HiddenStateServiceServicer_to_server(service, server)
        port = server.add_insecure_port(address)
        server.start()
        servers.append(server)
        return server, f"127.0.0.1:{port}"

    yield start_server
    for server in servers:
        server.stop(0).wait(5)


def test_handshake_and_instance(start: Start) -> None:
    _, address = start(Service())
    with TargetClient(address) as client:
        assert client.get_target().model_id == "m"
        client.lease_packs(pb.LeasePacksRequest())
        assert client.reconnects == 0, "the same process has answered twice"


def test_other_protocol_is_refused(start: Start) -> None:
    _, address = start(Service(protocol_version=2))
    with TargetClient(address) as client, pytest.raises(SlipstreamError, match="speaks protocol 2") as caught:
        client.get_target()
    assert caught.value.reason is Reason.PROTOCOL_MISMATCH


def test_waits_while_loading_and_says_so(start: Start) -> None:
    _, address = start(Service(failures=[SlipstreamError("The model is loading.", reason=Reason.TARGET_LOADING)]))
    waits: list[tuple[Reason, float]] = []
    with TargetClient(address, on_wait=lambda reason, seconds: waits.append((reason, seconds))) as client:
        assert client.get_target().model_id == "m"
        assert client.reconnects == 0
    assert [reason for reason, _ in waits] == [Reason.TARGET_LOADING]
    assert all(seconds >= 1.0 for _, seconds in waits)  # the server's RetryInfo is the least


def test_refusals_are_raised_at_once(start: Start) -> None:
    stale = SlipstreamError("A newer owner exists.", reason=Reason.INCARNATION_STALE, remedy="Stop.")
    service = Service(failures=[stale])
    _, address = start(service)
    with TargetClient(address) as client, pytest.raises(SlipstreamError) as caught:
        client.lease_packs(pb.LeasePacksRequest())
    assert (caught.value.reason, caught.value.message, caught.value.remedy) == (stale.reason, stale.message, "Stop.")
    assert len(service.requests) == 1


def test_whoever_waited_hears_of_the_answer_whatever_it_is(start: Start) -> None:
    full = SlipstreamError("full", reason=Reason.LEASE_QUOTA_EXCEEDED)
    service = Service()
    _, address = start(service)
    heard: list[str] = []
    stop = threading.Event()

    def note_wait(reason: Reason, _seconds: float) -> None:
        heard.append(reason.value)
        if len(service.requests) == 6:
            stop.set()

    client = TargetClient(address, on_wait=note_wait, on_answer=lambda: heard.append("answer"), stop=stop)
    with client:
        client.release_leases(pb.ReleaseLeasesRequest())
        service.failures = [full]
        client.release_leases(pb.ReleaseLeasesRequest())
        service.failures = [full, SlipstreamError("gone", reason=Reason.LEASE_LOST)]
        with pytest.raises(SlipstreamError, match="gone"):
            client.seek_subscription(pb.SeekSubscriptionRequest())
        service.failures = [full]
        with pytest.raises(WaitInterruptedError):
            client.release_leases(pb.ReleaseLeasesRequest())
    wait = full.reason.value
    assert heard == ["answer", wait, "answer", wait, "answer", wait]


def test_survives_a_restart_and_counts_it(start: Start) -> None:
    server, address = start(Service())
    waiting = threading.Event()
    with TargetClient(address, on_wait=lambda *_: waiting.set()) as client, ThreadPoolExecutor(1) as pool:
        client.get_target()
        server.stop(0).wait(5)
        answer = pool.submit(client.lease_packs, pb.LeasePacksRequest())
        assert waiting.wait(10)
        start(Service(), address)
        assert answer.result(timeout=20) == pb.LeasePacksResponse()
        assert client.reconnects >= 2  # once for the lost connection, once for the new instance


def test_a_call_that_a_stopping_server_cancels_is_made_again(start: Start) -> None:
    service = Service(cancels=1)
    _, address = start(service)
    waits: list[Reason] = []
    with TargetClient(address, on_wait=lambda reason, _: waits.append(reason)) as client:
        assert client.lease_packs(pb.LeasePacksRequest()) == pb.LeasePacksResponse()
        assert client.reconnects == 1
    assert waits == [Reason.TARGET_UNREACHABLE] and len(service.requests) == 2


def test_a_farewell_is_short(start: Start) -> None:
    service = Service()
    _, address = start(service)
    with TargetClient(address) as client:
        client.release_leases(pb.ReleaseLeasesRequest())
        client.release_leases(pb.ReleaseLeasesRequest(subscription="subscriptions/a"))
    assert service.seconds_left[0] > 10.0 and service.seconds_left[1] < 4.0


def test_a_restart_between_two_calls_is_noticed(start: Start) -> None:
    server, address = start(Service())
    with TargetClient(address) as client:
        client.get_target()
        server.stop(0).wait(5)
        start(Service(), address)
        client.lease_packs(pb.LeasePacksRequest())
        assert client.reconnects >= 1


def test_stop_ends_the_wait_for_an_absent_target() -> None:
    stop, waiting = threading.Event(), threading.Event()
    client = TargetClient("127.0.0.1:1", on_wait=lambda *_: waiting.set(), stop=stop)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.get_target)
        assert waiting.wait(10)
        stop.set()
        with pytest.raises(WaitInterruptedError):
            call.result(timeout=10)
    client.close()


def test_one_attempt_is_made_after_stop(start: Start) -> None:
    _, address = start(Service())
    stop = threading.Event()
    stop.set()
    with TargetClient(address, stop=stop) as client:
        assert client.get_target().model_id == "m"  # leases can still be given back while leaving


def test_interrupt_ends_a_long_call_in_flight(start: Start) -> None:
    service = Service(hold=threading.Event())
    _, address = start(service)
    with TargetClient(address, token="secret") as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.seek_subscription, pb.SeekSubscriptionRequest())
        assert service.entered.wait(10)
        client.interrupt()
        with pytest.raises(WaitInterruptedError):
            call.result(timeout=5)
        assert service.hold is not None
        service.hold.set()
        # Afterwards no other is begun, while short calls still are.
        with pytest.raises(WaitInterruptedError):
            client.seek_subscription(pb.SeekSubscriptionRequest())
        assert client.get_target().model_id == "m"
    assert len(service.requests) == 2


def test_close_cancels_a_call_in_flight(start: Start) -> None:
    service = Service(hold=threading.Event())
    _, address = start(service)
    client = TargetClient(address)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.lease_packs, pb.LeasePacksRequest())
        assert service.entered.wait(10)
        started = time.monotonic()
        client.close()
        with pytest.raises(WaitInterruptedError):
            call.result(timeout=10)
        assert time.monotonic() - started < 5
        with pytest.raises(WaitInterruptedError):
            client.get_target()
    assert service.hold is not None
    service.hold.set()


def test_token_is_sent_with_every_call(start: Start) -> None:
    service = Service()
    _, address = start(service)
    with TargetClient(address, token="secret") as client:
        client.get_target()
    assert service.metadata[0]["authorization"] == "Bearer secret"


def test_retried_seek_keeps_its_request_id(start: Start) -> None:
    service = Service(failures=[SlipstreamError("full", reason=Reason.LEASE_QUOTA_EXCEEDED)])
    _, address = start(service)
    request = pb.SeekSubscriptionRequest(subscription="subscriptions/a", next_step=3)
    with TargetClient(address, on_wait=lambda *_: None) as client:
        assert client.seek_subscription(request).incarnation == 5
        client.seek_subscription(request)
    first, retry, second = (seek.request_id for seek in service.requests)  # type: ignore[attr-defined]
    assert first == retry != second and first and request.request_id == ""


@pytest.mark.parametrize("address", ["", "localhost", "host:port", "http://host:1", ":50051", "a b:1"])
def test_address_without_a_port_is_refused(address: str) -> None:
    with pytest.raises(SlipstreamError, match="not the address") as caught:
        TargetClient(address)
    assert caught.value.reason is Reason.SPEC_INVALID and "HOST:PORT" in caught.value.remedy


def test_backoff_grows_and_is_bounded() -> None:
    backoff = Backoff()
    waits = [backoff.next_seconds() for _ in range(20)]
    assert 0.05 <= waits[0] <= 0.1 and all(2.5 <= wait <= 5.0 for wait in waits[6:])
    assert backoff.next_seconds(at_least=100.0) >= 100.0


@pytest.mark.parametrize("address", ["", "nonsense", "h:", "h:0", "h:65536", "h:99999", "h:-1", "::1:5", "http://h:1"])
def test_what_no_target_can_answer_at_is_refused_and_not_waited_for(address: str) -> None:
    with pytest.raises(SlipstreamError, match="is not the address of a target server") as refused:
        TargetClient(address)
    assert refused.value.reason is Reason.SPEC_INVALID and "HOST:PORT" in refused.value.remedy


@pytest.mark.parametrize("address", ["h:1", "127.0.0.1:65535", "[::1]:50051", "unix:/run/target.sock"])
def test_what_a_target_may_answer_at(address: str) -> None:
    TargetClient(address).close()
