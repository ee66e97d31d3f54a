"""One vocabulary of errors on both ends of the wire.

The server's interceptor turns a SlipstreamError into a gRPC status with `google.rpc.ErrorInfo` (and RetryInfo where
waiting helps); the client turns the status back into a SlipstreamError with the same reason, message and remedy.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

ERROR_DOMAIN = "slipstream"
SERVER_INSTANCE_KEY = "slipstream-server-instance"
"""Initial metadata of every response: random, new with every start of the server."""

STATUS_CODES: Mapping[Reason, grpc.StatusCode] = MappingProxyType(
    {
        Reason.SPEC_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
        Reason.DATA_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
        Reason.MODEL_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
        Reason.PATH_NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
        Reason.ACCESS_DENIED: grpc.StatusCode.UNAUTHENTICATED,
        Reason.ENVIRONMENT_UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
        Reason.TRANSPORT_UNAVAILABLE: grpc.StatusCode.FAILED_PRECONDITION,
        Reason.PROTOCOL_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
        Reason.TARGET_FINGERPRINT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
        Reason.TARGET_INCOMPATIBLE: grpc.StatusCode.FAILED_PRECONDITION,
        Reason.STREAM_CLOSED: grpc.StatusCode.FAILED_PRECONDITION,
        Reason.STREAM_CHANGED: grpc.StatusCode.FAILED_PRECONDITION,
        Reason.INCARNATION_STALE: grpc.StatusCode.FAILED_PRECONDITION,
        Reason.SUBSCRIPTION_UNKNOWN: grpc.StatusCode.NOT_FOUND,
        Reason.LEASE_LOST: grpc.StatusCode.ABORTED,
        Reason.LEASE_QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.OUT_OF_MEMORY: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.DISK_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Reason.TARGET_LOADING: grpc.StatusCode.UNAVAILABLE,
        Reason.TARGET_DRAINING: grpc.StatusCode.UNAVAILABLE,
        Reason.LEDGER_UNWRITABLE: grpc.StatusCode.UNAVAILABLE,
        Reason.PAYLOAD_CORRUPT: grpc.StatusCode.DATA_LOSS,
    }
)
"""Status code of every reason a target server refuses with; any other is INTERNAL."""

_RETRY_SECONDS = {
    Reason.LEASE_QUOTA_EXCEEDED: 0.5,
    Reason.LEDGER_UNWRITABLE: 0.5,
    Reason.TARGET_LOADING: 1.0,
    Reason.TARGET_DRAINING: 2.0,
}

# Reasons for a status that no Slipstream server wrote: the transport, a proxy, a server of another version.
_REASONS_OF_BARE_CODES = {
    grpc.StatusCode.UNAVAILABLE: (Reason.TARGET_UNREACHABLE, "Is the target server running at this address?"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (Reason.TARGET_UNREACHABLE, "The target server did not answer in time."),
    # How a server that stops ends the calls in flight; who cancels a call of their own knows it without this table.
    grpc.StatusCode.CANCELLED: (Reason.TARGET_UNREACHABLE, "The target server ended the call: it is stopping."),
    grpc.StatusCode.UNIMPLEMENTED: (
        Reason.PROTOCOL_MISMATCH,
        "What listens at this address is no target server of this version of Slipstream.",
    ),
    grpc.StatusCode.UNAUTHENTICATED: (Reason.ACCESS_DENIED, "Give the target server's token."),
    grpc.StatusCode.PERMISSION_DENIED: (Reason.ACCESS_DENIED, "The token does not permit this."),
}

HEALTH_METHODS = "/grpc.health.v1.Health/"
"""How the names of the standard health service's methods begin."""

_DETAILS_KEY = "grpc-status-details-bin"

_TEXT_LIMIT_BYTES = 1000
"""Of a message or remedy: the status goes, percent-encoded and once more in base64, into trailers of 8 KiB in all."""

MessageHandler = Callable[[Any, grpc.ServicerContext], Any]


def encode_error(error: SlipstreamError) -> "_Status":
    """The status to abort an RPC with: code, message, ErrorInfo and, where waiting helps, RetryInfo."""
    code = STATUS_CODES.get(error.reason, grpc.StatusCode.INTERNAL)
    status = status_pb2.Status(code=code.value[0], message=_shorten(error.message))
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=ERROR_DOMAIN)
    if error.remedy:
        info.metadata["remedy"] = _shorten(error.remedy)
    status.details.add().Pack(info)
    if error.reason in _RETRY_SECONDS:
        delay = Duration()
        delay.FromMilliseconds(int(1000 * _RETRY_SECONDS[error.reason]))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return _Status(code, status.message, ((_DETAILS_KEY, status.SerializeToString()),))


def decode_error(error: grpc.RpcError) -> SlipstreamError:
    """What the server raised; a status without our ErrorInfo gets the reason that its code suggests."""
    details = _error_details(error)
    if details is not None:
        status, info = details
        remedy = info.metadata.get("remedy", "")
        if info.reason in Reason.__members__:
            return SlipstreamError(status.message, reason=Reason(info.reason), remedy=remedy)
        return SlipstreamError(f"{info.reason}: {status.message}", reason=Reason.INTERNAL, remedy=remedy)
    code = error.code()
    reason, remedy = _REASONS_OF_BARE_CODES.get(code, (Reason.INTERNAL, "The target server's log says more."))
    return SlipstreamError(f"{code.name}: {error.details()}", reason=reason, remedy=remedy)


def retry_delay(error: grpc.RpcError) -> float:
    """Seconds the server asked to wait before a retry; 0.0 when it did not ask."""
    status = _rich_status(error)
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info = error_details_pb2.RetryInfo()
            detail.Unpack(info)
            return float(info.retry_delay.ToTimedelta().total_seconds())
    return 0.0


class StatusInterceptor(grpc.ServerInterceptor):
    """Server side: names the server's instance in every response and turns SlipstreamError into a status.

    Health checks pass untouched. Any other exception keeps gRPC's treatment: logged with its traceback, status UNKNOWN.
    Handlers must leave the initial metadata alone.
    """

    def __init__(self, instance_id: str | None = None) -> None:
        self.instance_id = instance_id or secrets.token_hex(8)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Wrap the handler of one call."""
        handler = continuation(handler_call_details)
        if handler is None or handler.request_streaming:  # unknown method, or reflection's stream: not ours
            return handler
        if handler_call_details.method.startswith(HEALTH_METHODS):
            return handler  # wrapped, a Watch would no longer be non-blocking: each would hold a thread for ever
        wrap, behavior, make = (
            (self._stream, handler.unary_stream, grpc.unary_stream_rpc_method_handler)
            if handler.response_streaming
            else (self._unary, handler.unary_unary, grpc.unary_unary_rpc_method_handler)
        )
        return make(
            wrap(behavior),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _unary(self, behavior: MessageHandler) -> MessageHandler:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            self._name_instance(context)
            try:
                return behavior(request, context)
            except SlipstreamError as error:
                _abort(context, error)

        return call

    def _stream(self, behavior: MessageHandler) -> MessageHandler:
        def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            self._name_instance(context)
            try:
                yield from behavior(request, context)
            except SlipstreamError as error:
                _abort(context, error)

        return call

    def _name_instance(self, context: grpc.ServicerContext) -> None:
        context.send_initial_metadata(((SERVER_INSTANCE_KEY, self.instance_id),))


def _abort(context: grpc.ServicerContext, error: SlipstreamError) -> NoReturn:
    context.abort_with_status(encode_error(error))
    raise AssertionError("abort_with_status raises")


def _error_details(error: grpc.RpcError) -> tuple[status_pb2.Status, error_details_pb2.ErrorInfo] | None:
    status = _rich_status(error)
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            if info.domain == ERROR_DOMAIN:
                return status, info
    return None


def _rich_status(error: grpc.RpcError) -> status_pb2.Status | None:
    raw = dict(error.trailing_metadata() or ()).get(_DETAILS_KEY)
    if raw is None:
        return None
    try:
        return status_pb2.Status.FromString(raw)
    except DecodeError:  # not written by a server of ours: code and message are all there is
        return None


class _Status(NamedTuple):
    """What `abort_with_status` reads; grpc.Status itself is an empty interface."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def _shorten(text: str) -> str:
    raw = text.encode()
    return text if len(raw) <= _TEXT_LIMIT_BYTES else raw[:_TEXT_LIMIT_BYTES].decode(errors="ignore") + "…"
