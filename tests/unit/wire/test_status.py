"""Errors cross the wire with reason, message and remedy; the server names its instance."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.status import SERVER_INSTANCE_KEY, STATUS_CODES, StatusInterceptor, decode_error, retry_delay


def _raise(request: bytes, _context: grpc.ServicerContext) -> bytes:
    if request == b"bug":
        raise KeyError("a bug")
    if request == b"ok":
        return b"fine"
    reason, _, message = request.decode().partition(":")
    raise SlipstreamError(message, reason=Reason(reason), remedy="Do ⊕ this.")


def _raise_later(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    yield b"first"
    yield _raise(request, context)


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    server = grpc.server(ThreadPoolExecutor(4), interceptors=[StatusInterceptor("instance-7")])
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(_raise),
        "Stream": grpc.unary_stream_rpc_method_handler(_raise_later),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    server.stop(0).wait(5)


def failure(channel: grpc.Channel, request: str, method: str = "Unary") -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/test.Service/{method}")(request.encode(), timeout=10)
    return caught.value


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_crosses_the_wire(channel: grpc.Channel, reason: Reason) -> None:
    error = failure(channel, f"{reason}:What happened: 漢字.")
    assert error.code() is STATUS_CODES.get(reason, grpc.StatusCode.INTERNAL)
    decoded = decode_error(error)
    assert (decoded.reason, decoded.message, decoded.remedy) == (reason, "What happened: 漢字.", "Do ⊕ this.")


def test_codes_of_the_contract() -> None:
    assert {reason.value: STATUS_CODES[reason].name for reason in STATUS_CODES if reason in _CONTRACT} == {
        reason.value: code for reason, code in _CONTRACT.items()
    }


_CONTRACT = {
    Reason.TARGET_FINGERPRINT_MISMATCH: "FAILED_PRECONDITION",
    Reason.STREAM_CLOSED: "FAILED_PRECONDITION",
    Reason.LEASE_LOST: "ABORTED",
    Reason.LEASE_QUOTA_EXCEEDED: "RESOURCE_EXHAUSTED",
    Reason.TARGET_LOADING: "UNAVAILABLE",
    Reason.TARGET_DRAINING: "UNAVAILABLE",
    Reason.LEDGER_UNWRITABLE: "UNAVAILABLE",
    Reason.INCARNATION_STALE: "FAILED_PRECONDITION",
    Reason.PAYLOAD_CORRUPT: "DATA_LOSS",
}


def test_retry_delay_only_where_waiting_helps(channel: grpc.Channel) -> None:
    assert retry_delay(failure(channel, "LEASE_QUOTA_EXCEEDED:full")) == 0.5
    assert retry_delay(failure(channel, "LEDGER_UNWRITABLE:full")) == 0.5
    assert retry_delay(failure(channel, "LEASE_LOST:gone")) == 0.0


def test_error_in_the_middle_of_a_stream(channel: grpc.Channel) -> None:
    stream = channel.unary_stream("/test.Service/Stream")(b"LEASE_LOST:gone", timeout=10)
    assert next(stream) == b"first"
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert decode_error(caught.value).reason is Reason.LEASE_LOST


def test_long_messages_are_cut_not_lost(channel: grpc.Channel) -> None:
    decoded = decode_error(failure(channel, f"DATA_INVALID:{'漢' * 5000}"))
    assert decoded.reason is Reason.DATA_INVALID and decoded.message == "漢" * 333 + "…"


@pytest.mark.parametrize(
    ("request_text", "method", "reason"),
    [("bug", "Unary", Reason.INTERNAL), ("x", "Missing", Reason.PROTOCOL_MISMATCH)],
)
def test_status_without_our_details(channel: grpc.Channel, request_text: str, method: str, reason: Reason) -> None:
    assert decode_error(failure(channel, request_text, method)).reason is reason


def test_every_response_names_the_instance(channel: grpc.Channel) -> None:
    _, call = channel.unary_unary("/test.Service/Unary").with_call(b"ok", timeout=10)
    assert dict(call.initial_metadata())[SERVER_INSTANCE_KEY] == "instance-7"
    stream = channel.unary_stream("/test.Service/Stream")(b"ok", timeout=10)
    assert dict(stream.initial_metadata())[SERVER_INSTANCE_KEY] == "instance-7"
    assert list(stream) == [b"first", b"fine"]


def test_a_watch_of_the_health_holds_no_thread() -> None:
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[StatusInterceptor()])
    service = health.HealthServicer()
    service.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(6)]
        for watch in watches:
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status == health_pb2.HealthCheckResponse.SERVING
        for watch in watches:
            watch.cancel()
    server.stop(0).wait(5)
