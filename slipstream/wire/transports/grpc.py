"""Between any two hosts: payload bytes as a server stream of raw messages, resumable from any offset.

Generated code would wrap every chunk in a protobuf message, which costs one more copy on each side; here a message on
the wire is the bytes themselves.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1.hidden_state_service_pb2_grpc import (
    HiddenStateServiceServicer,
    add_HiddenStateServiceServicer_to_server,
)
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import RETRIED_REASONS, Backoff, WaitInterruptedError
from slipstream.wire.codec import ByteArray
from slipstream.wire.status import decode_error, retry_delay
from slipstream.wire.transports.base import ByteRun, PayloadReader, PayloadRef

CHUNK_BYTES = 2 * 2**20
"""Largest message of the stream. Smaller costs calls, larger costs memory and nears gRPC's limit of 4 MiB."""

_METHOD = "ReadPayload"
_PATH = f"/slipstream.hidden_states.v1.HiddenStateService/{_METHOD}"
_PATIENCE_SECONDS = 60.0  # for a payload that never expires
_STREAM_SECONDS, _SLOWEST_BYTES_PER_SECOND = 20.0, 10e6  # a stream's deadline: what it may take at the very slowest


@dataclass(frozen=True, slots=True)
class OpenPayload:
    """A payload that the server has found for a token."""

    buffer: ByteArray
    """The payload's bytes, uint8 `[payload_size_bytes]`."""
    still_valid: Callable[[], bool]
    """False once the slot was given to another payload; asked after the copy of every chunk."""


PayloadSource = Callable[[bytes], OpenPayload]
"""Finds the payload of a token; raises SlipstreamError LEASE_LOST for one that does not count any more."""


def raw_read_handler(payload_source: PayloadSource) -> grpc.RpcMethodHandler:
    """The server's half of ReadPayload: chunks of at most 2 MiB, never bytes of another payload."""

    def read(request: pb.ReadPayloadRequest, _context: grpc.ServicerContext) -> Iterator[bytes]:
        payload = payload_source(request.lease_token)
        start, end = _requested_range(request, payload.buffer.nbytes)
        for position in range(start, end, CHUNK_BYTES):
            chunk = payload.buffer[position : min(position + CHUNK_BYTES, end)].tobytes()
            if not payload.still_valid():
                raise SlipstreamError("The slot was used again during the read.", reason=Reason.LEASE_LOST)
            yield chunk

    return grpc.unary_stream_rpc_method_handler(
        read, request_deserializer=pb.ReadPayloadRequest.FromString, response_serializer=None
    )


def add_hidden_state_service(
    server: grpc.Server, servicer: HiddenStateServiceServicer, payload_source: PayloadSource
) -> None:
    """Register the service as the generated code does, with ReadPayload served by `raw_read_handler`.

    The server needs the StatusInterceptor: `payload_source` and the handler refuse with SlipstreamError.
    """
    generated = _HandlerCollector()
    add_HiddenStateServiceServicer_to_server(servicer, generated)  # type: ignore[no-untyped-call]
    handlers = {**generated.handlers, _METHOD: raw_read_handler(payload_source)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(generated.service, handlers),))
    server.add_registered_method_handlers(generated.service, handlers)


class GrpcReader(PayloadReader):
    """Reads payloads over the channel to the server, one stream for every run of neighbouring tensors.

    A broken stream goes on where it stopped until the lease would have run out.
    """

    name = "grpc"
    transport = pb.TRANSPORT_GRPC
    verifies_fixed_payloads = True

    def __init__(self, channel: grpc.Channel, *, stop: threading.Event | None = None, pin_memory: bool = False) -> None:
        """`stop`: set it to end waiting for an absent server; the read raises WaitInterruptedError."""
        super().__init__(pin_memory=pin_memory)
        self._stop = stop or threading.Event()
        self._method = channel.unary_stream(
            _PATH, request_serializer=pb.ReadPayloadRequest.SerializeToString, response_deserializer=None
        )

    def _fill(self, ref: PayloadRef, run: ByteRun, buffer: ByteArray) -> None:
        self._receive(ref, run.offset_bytes, buffer)

    def close(self) -> None:
        """The channel belongs to the client: nothing to give back."""

    def _receive(self, ref: PayloadRef, offset_bytes: int, buffer: ByteArray) -> None:
        patience = _PATIENCE_SECONDS if ref.time_to_live is None else ref.time_to_live
        give_up = time.monotonic() + patience
        backoff = Backoff()
        received = 0
        while received < buffer.nbytes:
            before = received
            try:
                for chunk in self._open(ref.token, offset_bytes + received, buffer.nbytes - received):
                    received = _store(chunk, buffer, received)
                if received < buffer.nbytes:
                    raise _corrupt(f"The stream ended after {received} of {buffer.nbytes} bytes.")
            except grpc.RpcError as error:
                if received > before:
                    backoff = Backoff()
                self._wait(error, backoff, give_up, ref)

    def _open(self, token: bytes, offset_bytes: int, size_bytes: int) -> Any:
        request = pb.ReadPayloadRequest(lease_token=token, offset_bytes=offset_bytes, size_bytes=size_bytes)
        seconds = _STREAM_SECONDS + size_bytes / _SLOWEST_BYTES_PER_SECOND
        try:
            return self._method(request, timeout=seconds)
        except ValueError as error:  # how gRPC says that another thread closed the channel
            raise WaitInterruptedError from error

    def _wait(self, error: grpc.RpcError, backoff: Backoff, give_up: float, ref: PayloadRef) -> None:
        """Wait before the next stream, or raise what makes another one pointless."""
        if error.code() is grpc.StatusCode.CANCELLED and self._stop.is_set():
            raise WaitInterruptedError from error
        failure = decode_error(error)
        if failure.reason not in RETRIED_REASONS:
            raise failure from error
        seconds = backoff.next_seconds(retry_delay(error))
        if time.monotonic() + seconds > give_up:
            if ref.time_to_live is None:
                raise failure from error
            raise SlipstreamError(
                f"The target server was away for longer than the lease of {ref.time_to_live:.0f} s: {failure.message}",
                reason=Reason.LEASE_LOST,
                remedy="The pack is leased again once the target is back.",
            ) from error
        if self._stop.wait(seconds):
            raise WaitInterruptedError from error


class _HandlerCollector:
    """Stands in for a server while the generated code registers its handlers."""

    def __init__(self) -> None:
        self.service = ""
        self.handlers: dict[str, grpc.RpcMethodHandler] = {}

    def add_generic_rpc_handlers(self, _handlers: Any) -> None:
        """The same handlers once more; the named ones below say more."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self.service, self.handlers = service, handlers


def _store(chunk: bytes, buffer: ByteArray, position: int) -> int:
    """Copy a message to its place; returns the position after it."""
    end = position + len(chunk)
    if end > buffer.nbytes:
        raise _corrupt(f"The stream holds more than the {buffer.nbytes} bytes asked for.")
    buffer[position:end] = np.frombuffer(chunk, np.uint8)
    return end


def _requested_range(request: pb.ReadPayloadRequest, payload_bytes: int) -> tuple[int, int]:
    """First byte and end; a size of 0 means everything from the offset on."""
    start = request.offset_bytes
    end = start + request.size_bytes if request.size_bytes else payload_bytes
    if not 0 <= start <= end <= payload_bytes:
        raise SlipstreamError(
            f"Bytes {start}..{end} were asked for of a payload of {payload_bytes} bytes.", reason=Reason.SPEC_INVALID
        )
    return start, end


def _corrupt(message: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.PAYLOAD_CORRUPT)
