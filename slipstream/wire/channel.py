"""The trainer's connection to a target server: every RPC typed, with a deadline, retried until the target is back."""

import logging
import random
import re
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1 import stream_admin_service_pb2 as admin_pb
from slipstream.hidden_states.v1.hidden_state_service_pb2_grpc import HiddenStateServiceStub
from slipstream.hidden_states.v1.stream_admin_service_pb2_grpc import StreamAdminServiceStub
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from slipstream.wire.status import SERVER_INSTANCE_KEY, decode_error, retry_delay

PROTOCOL_VERSION = 1
"""Trainer and target server refuse each other when theirs differ."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's own reconnect backoff grows to two minutes; ours below is the one that counts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
)
"""Client side. The default limit of 4 MiB a message is kept: nothing larger is ever sent."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind the same port
)
"""For `grpc.server(options=…)`; keepalive agrees with CHANNEL_OPTIONS."""

RETRIED_REASONS = frozenset(
    {
        Reason.TARGET_UNREACHABLE,
        Reason.TARGET_LOADING,
        Reason.TARGET_DRAINING,
        Reason.LEDGER_UNWRITABLE,
        Reason.LEASE_QUOTA_EXCEEDED,
    }
)
"""Failures that waiting mends: the call is made again, although an answer may have been lost.

All but two RPCs may be repeated as they are. A lost answer of LeasePacks leaves leases that nobody knows of, and a
second ConfirmRead says that the lease is over: a caller that sees `reconnects` grow must seek, which mends both.
"""

OnWait = Callable[[Reason, float], None]
"""Told before every wait: why, and for how many seconds."""

Response = TypeVar("Response", bound=Message)

_DEADLINE_SECONDS = 20.0
_LEAVE_DEADLINE_SECONDS = 3.0
_OPEN_DEADLINE_SECONDS = 900.0  # the first subscription of a stream reads and tokenizes the data
_ADDRESS = re.compile(r"unix:.+|(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
_LARGEST_PORT = 65_535
_log = logging.getLogger(__name__)


class WaitInterruptedError(SlipstreamError):
    """The stop event was set, or the channel closed, while a call waited: for the target, if nothing else is said."""

    def __init__(self, waited_for: str = "the target server") -> None:
        super().__init__(f"Stopped while waiting for {waited_for}.", reason=Reason.TARGET_UNREACHABLE)


class Backoff:
    """Waits that double from 0.1 s to 5 s, each drawn from the upper half of its range."""

    _FIRST_SECONDS, _LAST_SECONDS = 0.1, 5.0

    def __init__(self) -> None:
        self._seconds = self._FIRST_SECONDS
        self._random = random.Random()  # of its own: the run's generators must not notice a lost connection

    def next_seconds(self, at_least: float = 0.0) -> float:
        """Seconds to wait now; `at_least` is what the server asked for."""
        seconds, self._seconds = self._seconds, min(2 * self._seconds, self._LAST_SECONDS)
        return at_least + seconds * self._random.uniform(0.5, 1.0)


class TargetClient:
    """Calls one target server.

    Every method sends one request and returns its response. While the target is unreachable, loading or draining, or
    cannot write its ledger, a call waits and tries again for ever; `stop` ends the wait with WaitInterruptedError.
    Every other refusal is raised as the SlipstreamError the server raised. Threads may share a client.

    Calls that may take minutes (to open or seek a subscription) are not begun once `stop` is set, and `interrupt` ends
    those in flight. All others are tried once even then: a trainer that leaves still commits and gives leases back.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        on_wait: OnWait | None = None,
        on_answer: Callable[[], None] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            address: HOST:PORT or unix:PATH.
            token: sent as `authorization: Bearer …` with every call.
            on_wait: called before every wait; default: a warning in the log.
            on_answer: called in the thread of every call once the target has answered it, be it with a refusal.
            stop: set it to end all waiting.

        Raises:
            SlipstreamError: SPEC_INVALID when the address has no port, or one that there is not.
        """
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match["port"] or 1) <= _LARGEST_PORT:
            raise SlipstreamError(
                f"{address!r} is not the address of a target server.",
                reason=Reason.SPEC_INVALID,
                remedy="Give HOST:PORT, for example 127.0.0.1:50051.",
            )
        self.address = address
        self.stop = stop or threading.Event()
        self._on_wait = on_wait or self._log_wait
        self._on_answer = on_answer or _say_nothing
        self._lock = threading.Lock()
        self._reconnects = 0
        self._instance_id = ""
        """Of the server process that answered last; empty before the first answer."""
        self._closed = False
        self._long_calls: set[Any] = set()
        channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.channel: grpc.Channel = grpc.intercept_channel(channel, _BearerToken(token)) if token else channel
        self._stub = HiddenStateServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self._admin = StreamAdminServiceStub(self.channel)  # type: ignore[no-untyped-call]

    @property
    def reconnects(self) -> int:
        """Grows when the connection was lost or the server is another process than before.

        Leases live in the server's memory: a caller that sees this grow across a call must seek (see the protocol).
        """
        with self._lock:
            return self._reconnects

    def get_target(self) -> pb.GetTargetResponse:
        """The handshake.

        Raises:
            SlipstreamError: PROTOCOL_MISMATCH when the server speaks another version.
        """
        target = self._call(
            pb.GetTargetResponse, self._stub.GetTarget, pb.GetTargetRequest(protocol_version=PROTOCOL_VERSION)
        )
        if target.protocol_version != PROTOCOL_VERSION:
            raise SlipstreamError(
                f"The target server at {self.address} speaks protocol {target.protocol_version}, "
                f"this trainer speaks {PROTOCOL_VERSION}.",
                reason=Reason.PROTOCOL_MISMATCH,
                remedy="Install the same version of Slipstream on both sides.",
            )
        return target

    def open_subscription(self, request: pb.OpenSubscriptionRequest) -> pb.OpenSubscriptionResponse:
        """Open the run's subscription, or find it. May take minutes: the server reads the data."""
        return self._call_for_long(pb.OpenSubscriptionResponse, self._stub.OpenSubscription, request)

    def seek_subscription(self, request: pb.SeekSubscriptionRequest) -> pb.SeekSubscriptionResponse:
        """Start a new incarnation at a cursor. A `request_id` is drawn when the request has none."""
        if not request.request_id:
            identified = pb.SeekSubscriptionRequest(request_id=uuid.uuid4().hex)
            identified.MergeFrom(request)
            request = identified
        return self._call_for_long(pb.SeekSubscriptionResponse, self._stub.SeekSubscription, request)

    def lease_packs(self, request: pb.LeasePacksRequest) -> pb.LeasePacksResponse:
        """Long poll: waits on the server for up to `request.max_wait`."""
        max_wait = request.max_wait.ToTimedelta().total_seconds()
        return self._call(pb.LeasePacksResponse, self._stub.LeasePacks, request, max_wait + _DEADLINE_SECONDS)

    def confirm_read(self, request: pb.ConfirmReadRequest) -> pb.ConfirmReadResponse:
        """After the copy, before the use."""
        return self._call(pb.ConfirmReadResponse, self._stub.ConfirmRead, request)

    def renew_leases(self, request: pb.RenewLeasesRequest) -> pb.RenewLeasesResponse:
        """Keep leases for longer."""
        return self._call(pb.RenewLeasesResponse, self._stub.RenewLeases, request)

    def release_leases(self, request: pb.ReleaseLeasesRequest) -> pb.ReleaseLeasesResponse:
        """Give leases back. A request that names a subscription is its farewell, and short: nobody waits to leave."""
        seconds = _LEAVE_DEADLINE_SECONDS if request.subscription else _DEADLINE_SECONDS
        return self._call(pb.ReleaseLeasesResponse, self._stub.ReleaseLeases, request, seconds)

    def commit_step(self, request: pb.CommitStepRequest) -> pb.CommitStepResponse:
        """Say that a step has been applied."""
        return self._call(pb.CommitStepResponse, self._stub.CommitStep, request)

    def pause_subscription(self, request: admin_pb.PauseSubscriptionRequest) -> admin_pb.PauseSubscriptionResponse:
        """Stop granting leases to a subscription."""
        return self._call(admin_pb.PauseSubscriptionResponse, self._admin.PauseSubscription, request)

    def resume_subscription(self, request: admin_pb.ResumeSubscriptionRequest) -> admin_pb.ResumeSubscriptionResponse:
        """Grant leases again."""
        return self._call(admin_pb.ResumeSubscriptionResponse, self._admin.ResumeSubscription, request)

    def close_subscription(self, request: admin_pb.CloseSubscriptionRequest) -> admin_pb.CloseSubscriptionResponse:
        """Forget a subscription."""
        return self._call(admin_pb.CloseSubscriptionResponse, self._admin.CloseSubscription, request)

    def get_stream_stats(self, request: admin_pb.GetStreamStatsRequest) -> admin_pb.GetStreamStatsResponse:
        """Counters of one stream."""
        return self._call(admin_pb.GetStreamStatsResponse, self._admin.GetStreamStats, request)

    def drain_target(self, request: admin_pb.DrainTargetRequest) -> admin_pb.DrainTargetResponse:
        """Stop granting leases to anybody; those that are out are finished."""
        return self._call(admin_pb.DrainTargetResponse, self._admin.DrainTarget, request)

    def interrupt(self) -> None:
        """Set `stop` and cancel the long calls in flight, which raise WaitInterruptedError; from any thread."""
        self.stop.set()
        with self._lock:
            calls = list(self._long_calls)
        for call in calls:
            call.cancel()

    def close(self) -> None:
        """Set `stop`, cancel the calls in flight (they raise WaitInterruptedError), disconnect; idempotent."""
        self._closed = True
        self.stop.set()
        self.channel.close()

    def __enter__(self) -> "TargetClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self, response_type: type[Response], method: Any, request: Message, seconds: float = _DEADLINE_SECONDS
    ) -> Response:
        return self._repeat(response_type, lambda: method.with_call(request, timeout=seconds))

    def _call_for_long(self, response_type: type[Response], method: Any, request: Message) -> Response:
        return self._repeat(response_type, lambda: self._interruptible(method, request))

    def _interruptible(self, method: Any, request: Message) -> tuple[Message, Any]:
        with self._lock:
            # Looked at and entered under one lock: whoever sets `stop` and interrupts later finds the call here.
            if self.stop.is_set():
                raise WaitInterruptedError()
            call = method.future(request, timeout=_OPEN_DEADLINE_SECONDS)
            self._long_calls.add(call)
        try:
            return call.result(), call
        except grpc.FutureCancelledError as error:
            raise WaitInterruptedError() from error
        finally:
            with self._lock:
                self._long_calls.discard(call)

    def _repeat(self, response_type: type[Response], attempt: Callable[[], tuple[Message, Any]]) -> Response:
        backoff = Backoff()
        while True:
            if self._closed:
                raise WaitInterruptedError()
            try:
                response, call = attempt()
            except grpc.RpcError as error:
                if self._closed:
                    raise WaitInterruptedError() from error
                failure = decode_error(error)
                if failure.reason not in RETRIED_REASONS:
                    self._on_answer()
                    raise failure from error
                self._wait(failure.reason, backoff.next_seconds(retry_delay(error)))
            except ValueError as error:  # how gRPC says that another thread closed the channel
                if not self._closed:
                    raise
                raise WaitInterruptedError() from error
            else:
                self._note_instance(call.initial_metadata())
                self._on_answer()
                assert isinstance(response, response_type)
                return response

    def _wait(self, reason: Reason, seconds: float) -> None:
        if reason is Reason.TARGET_UNREACHABLE:
            with self._lock:
                self._reconnects += 1
        if not self.stop.is_set():
            self._on_wait(reason, seconds)
        if self.stop.wait(seconds):
            raise WaitInterruptedError()

    def _note_instance(self, metadata: Sequence[tuple[str, str]]) -> None:
        instance_id = dict(metadata).get(SERVER_INSTANCE_KEY, "")
        with self._lock:
            if self._instance_id and instance_id != self._instance_id:
                self._reconnects += 1
            self._instance_id = instance_id

    def _log_wait(self, reason: Reason, seconds: float) -> None:
        log_event(_log, "warning", "target_wait", address=self.address, reason=reason, seconds=seconds)


def _say_nothing() -> None:
    pass


class _BearerToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds the token to the metadata of every call."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def _with_token(self, details: Any) -> Any:
        return _CallDetails(details, [*(details.metadata or ()), self._header])


class _CallDetails(grpc.ClientCallDetails):
    """The details of a call with other metadata."""

    def __init__(self, details: Any, metadata: list[tuple[str, str]]) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = metadata
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression
