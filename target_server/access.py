"""Who may call: with a token set, every RPC but the health check must carry it."""

import hmac
from collections.abc import Callable

import grpc

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.wire.status import HEALTH_METHODS, encode_error


class TokenInterceptor(grpc.ServerInterceptor):
    """Refuses calls without `authorization: Bearer TOKEN`."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Let the call through, or answer it with ACCESS_DENIED."""
        handler = continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH_METHODS):
            return handler
        given = dict(handler_call_details.invocation_metadata).get("authorization", "")
        if hmac.compare_digest(str(given).encode(), self._expected):
            return handler
        return _refusing(handler, "no token" if not given else "another token")


def _refusing(handler: grpc.RpcMethodHandler, found: str) -> grpc.RpcMethodHandler:
    """A handler of the same shape that only says no."""
    error = SlipstreamError(
        f"This target server asks for a token, and the call carries {found}.",
        reason=Reason.ACCESS_DENIED,
        remedy="Give the server's token: SLIPSTREAM_TOKEN or --token-file.",
    )

    def refuse(_request: object, context: grpc.ServicerContext) -> None:
        context.abort_with_status(encode_error(error))

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(refuse, handler.request_deserializer, handler.response_serializer)
