"""A read that the server ends: by stopping, not by refusing."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import WaitInterruptedError
from slipstream.wire.codec import plan_layout
from slipstream.wire.transports import GrpcReader, PayloadRef

TENSOR = torch.arange(100, dtype=torch.uint8)


class StoppingServer:
    """Sends half of what is left of TENSOR, then ends the call as `grpc.Server.stop` does; `cancels` times."""

    def __init__(self, cancels: int) -> None:
        self.offsets: list[int] = []
        self.on_cancel: Callable[[], None] = lambda: None
        self._cancels = cancels
        self._server = grpc.server(ThreadPoolExecutor(2))
        handler = grpc.unary_stream_rpc_method_handler(
            self._read, request_deserializer=pb.ReadPayloadRequest.FromString, response_serializer=None
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "slipstream.hidden_states.v1.HiddenStateService", {"ReadPayload": handler}
                ),
            )
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _read(self, request: pb.ReadPayloadRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        self.offsets.append(request.offset_bytes)
        rest = TENSOR.numpy().tobytes()[request.offset_bytes :]
        if len(self.offsets) > self._cancels:
            yield rest
            return
        yield rest[: len(rest) // 2]
        self.on_cancel()
        context.abort(grpc.StatusCode.CANCELLED, "Server shutting down")

    def close(self) -> None:
        self._server.stop(0).wait(5)


def payload(seconds: float) -> PayloadRef:
    layout = plan_layout([("x", torch.uint8, (100,))])
    manifest = batch_pb2.PackManifest(tensors=layout.specs, payload_size_bytes=layout.size_bytes)
    return PayloadRef(b"token", manifest, (), seconds)


@pytest.fixture
def serve() -> Iterator[Callable[[int], StoppingServer]]:
    servers: list[StoppingServer] = []

    def start(cancels: int) -> StoppingServer:
        servers.append(StoppingServer(cancels))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_a_read_goes_on_where_a_stopping_server_left_it(serve: Callable[[int], StoppingServer]) -> None:
    server = serve(1)
    with grpc.insecure_channel(server.address) as channel:
        assert torch.equal(GrpcReader(channel).read(payload(30.0), ["x"])["x"], TENSOR)
    assert server.offsets == [0, 50]


def test_a_server_that_keeps_stopping_costs_the_lease(serve: Callable[[int], StoppingServer]) -> None:
    server = serve(1000)
    with grpc.insecure_channel(server.address) as channel, pytest.raises(SlipstreamError) as caught:
        GrpcReader(channel).read(payload(0.3), ["x"])
    assert caught.value.reason is Reason.LEASE_LOST


def test_stop_ends_a_cancelled_read(serve: Callable[[int], StoppingServer]) -> None:
    server, stop = serve(1000), threading.Event()
    server.on_cancel = stop.set
    with grpc.insecure_channel(server.address) as channel, pytest.raises(WaitInterruptedError):
        GrpcReader(channel, stop=stop).read(payload(30.0), ["x"])
    assert server.offsets == [0]
