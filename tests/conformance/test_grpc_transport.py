"""What only a network does to a read: broken streams, flipped bits, a server that is away."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import TargetClient, WaitInterruptedError
from slipstream.wire.codec import ByteArray
from slipstream.wire.status import decode_error
from slipstream.wire.transports import GrpcReader, PayloadRef
from tests.fakes.payload_server import PayloadServer

MEBIBYTE = 2**20
READ_PATH = "/slipstream.hidden_states.v1.HiddenStateService/ReadPayload"


@pytest.fixture
def server() -> Iterator[PayloadServer]:
    server = PayloadServer(None, num_slots=1, slot_bytes=16 * MEBIBYTE)
    yield server
    server.close()


@pytest.fixture
def client(server: PayloadServer) -> Iterator[TargetClient]:
    with TargetClient(server.address) as client:
        yield client


def payload(size: int = 16 * MEBIBYTE) -> dict[str, torch.Tensor]:
    return {"x": torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)}


def record_offsets(channel: grpc.Channel) -> tuple[grpc.Channel, list[int]]:
    """The channel, and where every stream opened on it starts."""
    offsets: list[int] = []

    class Recorder(grpc.UnaryStreamClientInterceptor):
        def intercept_unary_stream(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def]
            offsets.append(request.offset_bytes)
            return continuation(client_call_details, request)

    return grpc.intercept_channel(channel, Recorder()), offsets


def test_broken_stream_goes_on_where_it_stopped(server: PayloadServer, client: TargetClient) -> None:
    tensors = payload()
    ref = PayloadRef.of_lease(server.put(0, tensors))
    broken = threading.Event()
    stopped: list[threading.Event] = []

    def break_once(chunk: int) -> None:
        if chunk == 6:
            stopped.append(server.stop_serving())
            broken.set()

    server.on_chunk = break_once
    channel, offsets = record_offsets(client.channel)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(GrpcReader(channel).read, ref, ["x"])
        assert broken.wait(10) and stopped[0].wait(10)
        server.start()
        assert torch.equal(read.result(timeout=30)["x"], tensors["x"])
    assert offsets[0] == 0 and len(offsets) > 1
    assert offsets[-1] > 0 and offsets[-1] % (2 * MEBIBYTE) == 0  # what had arrived was not sent again


def test_messages_are_raw_and_small(server: PayloadServer, client: TargetClient) -> None:
    tensors = payload(5 * MEBIBYTE)
    lease = server.put(0, tensors)
    method = client.channel.unary_stream(READ_PATH, request_serializer=pb.ReadPayloadRequest.SerializeToString)
    messages = list(method(pb.ReadPayloadRequest(lease_token=lease.lease_token, offset_bytes=7), timeout=10))
    assert b"".join(messages) == tensors["x"].numpy().tobytes()[7:]
    assert [len(message) for message in messages] == [2 * MEBIBYTE, 2 * MEBIBYTE, MEBIBYTE - 7]


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 1025), (1025, 0), (1000, 25), (0, -1)])
def test_range_outside_the_payload_is_refused(
    server: PayloadServer, client: TargetClient, offset: int, size: int
) -> None:
    lease = server.put(0, payload(1024))
    method = client.channel.unary_stream(READ_PATH, request_serializer=pb.ReadPayloadRequest.SerializeToString)
    request = pb.ReadPayloadRequest(lease_token=lease.lease_token, offset_bytes=offset, size_bytes=size)
    with pytest.raises(grpc.RpcError) as caught:
        list(method(request, timeout=10))
    assert decode_error(caught.value).reason is Reason.SPEC_INVALID


def flipped(buffer: ByteArray) -> ByteArray:
    wrong = buffer.copy()
    wrong[1000] ^= 1
    return wrong


def test_one_flipped_bit_is_mended_by_a_second_read(server: PayloadServer, client: TargetClient) -> None:
    tensors = {"a": torch.ones(64, dtype=torch.uint8), **payload(MEBIBYTE)}
    ref = PayloadRef.of_lease(server.put(0, tensors))
    reads: list[int] = []

    def flip_the_first(buffer: ByteArray) -> ByteArray:
        reads.append(len(reads))
        return flipped(buffer) if len(reads) == 1 else buffer

    server.on_open = flip_the_first
    channel, offsets = record_offsets(client.channel)
    found = GrpcReader(channel).read(ref, ["a", "x"])
    assert torch.equal(found["x"], tensors["x"])
    assert offsets == [0, 64]  # only the damaged tensor travelled twice


def test_a_bit_that_is_wrong_twice_is_an_error(server: PayloadServer, client: TargetClient) -> None:
    ref = PayloadRef.of_lease(server.put(0, payload(MEBIBYTE)))
    server.on_open = flipped
    with pytest.raises(SlipstreamError, match="crc32c 0x[0-9a-f]{8}, twice; expected 0x") as caught:
        GrpcReader(client.channel).read(ref, ["x"])
    assert caught.value.reason is Reason.PAYLOAD_CORRUPT


def test_payload_shorter_than_its_manifest(server: PayloadServer, client: TargetClient) -> None:
    ref = PayloadRef.of_lease(server.put(0, payload(4096)))
    server.on_open = lambda buffer: buffer[:1000]
    with pytest.raises(SlipstreamError, match=r"Bytes 0\.\.4096 were asked for of a payload of 1000 bytes"):
        GrpcReader(client.channel).read(ref, ["x"])


def test_stream_that_ends_early(client: TargetClient, server: PayloadServer) -> None:
    class Shortened(grpc.UnaryStreamClientInterceptor):
        def intercept_unary_stream(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def]
            request.size_bytes -= 1
            return continuation(client_call_details, request)

    ref = PayloadRef.of_lease(server.put(0, payload(4096)))
    with pytest.raises(SlipstreamError, match="ended after 4095 of 4096 bytes") as caught:
        GrpcReader(grpc.intercept_channel(client.channel, Shortened())).read(ref, ["x"])
    assert caught.value.reason is Reason.PAYLOAD_CORRUPT


def test_stop_ends_the_wait_for_a_server_that_is_away(server: PayloadServer, client: TargetClient) -> None:
    ref = PayloadRef.of_lease(server.put(0, payload(4096), seconds=600))
    server.stop_serving().wait(10)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(GrpcReader(client.channel, stop=stop).read, ref, ["x"])
        stop.set()
        with pytest.raises(WaitInterruptedError):
            read.result(timeout=10)


def test_closing_the_client_ends_a_read(server: PayloadServer, client: TargetClient) -> None:
    ref = PayloadRef.of_lease(server.put(0, payload()))
    reading, go_on = threading.Event(), threading.Event()

    def stall(_: int) -> None:
        reading.set()
        go_on.wait(20)

    server.on_chunk = stall
    reader = GrpcReader(client.channel)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(reader.read, ref, ["x"])
        assert reading.wait(10)
        client.close()
        with pytest.raises(WaitInterruptedError):
            read.result(timeout=10)
        with pytest.raises(WaitInterruptedError):
            reader.read(ref, ["x"])
    go_on.set()
