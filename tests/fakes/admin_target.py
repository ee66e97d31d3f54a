"""A target server without a model: the handshake, and the real admin service over a ledger."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1.hidden_state_service_pb2_grpc import (
    HiddenStateServiceServicer,
    add_HiddenStateServiceServicer_to_server,
)
from slipstream.hidden_states.v1.stream_admin_service_pb2_grpc import add_StreamAdminServiceServicer_to_server
from slipstream.run_spec.reasons import Reason
from slipstream.wire.channel import SERVER_OPTIONS
from slipstream.wire.status import StatusInterceptor
from target_server.admin_service import StreamAdminService
from target_server.producer import Throughput
from tests.fakes.ledger_desk import LedgerDesk


class _Target(HiddenStateServiceServicer):
    """Handshake, readiness and producer of a target that computes nothing."""

    def __init__(self) -> None:
        self.producer = self
        self.throughput = Throughput()
        self._drains = False

    def target(self) -> "_Target":
        return self

    def drain(self) -> None:
        self._drains = True

    def GetTarget(self, request: pb.GetTargetRequest, context: grpc.ServicerContext) -> pb.GetTargetResponse:  # noqa: N802
        if self._drains:
            raise SlipstreamError("draining", reason=Reason.TARGET_DRAINING)
        return pb.GetTargetResponse(protocol_version=1, model_id="m", target_fingerprint="f", server_version="1")


@contextmanager
def admin_target(ledger: LedgerDesk) -> Iterator[str]:
    """Serve; gives the address."""
    target = _Target()
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[StatusInterceptor()], options=SERVER_OPTIONS)
    add_HiddenStateServiceServicer_to_server(target, server)
    add_StreamAdminServiceServicer_to_server(StreamAdminService(ledger.control, target), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(10)
