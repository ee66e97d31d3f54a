"""⑦ HiddenStateService: decodes a request, calls the ledger, encodes the answer. Nothing here waits for the engine."""

# ruff: noqa: N802, ARG002 - names and arguments of RPCs are the contract's

import logging
import threading
from collections.abc import Iterable

import grpc
from google.protobuf.duration_pb2 import Duration

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1.hidden_state_service_pb2_grpc import HiddenStateServiceServicer
from slipstream.run_spec.names import NAME_RULE, is_name
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import MAX_EPOCHS
from slipstream.telemetry.logs import log_event
from slipstream.wire.channel import PROTOCOL_VERSION
from slipstream.wire.transports.grpc import OpenPayload
from target_server.lease_book import DeliveryState
from target_server.lease_ledger import Ask, LeaseLedger, SeekTo
from target_server.readiness import Readiness
from target_server.served_target import ServedTarget, open_payload
from target_server.subscription import Lease, Start, SubscriptionTerms

LONGEST_POLL_SECONDS = 30.0
"""A longer max_wait is shortened to this; the caller asks again."""

_log = logging.getLogger(__name__)
_STARTS = {
    pb.START_POSITION_UNSPECIFIED: Start.BEGINNING,
    pb.START_POSITION_BEGINNING: Start.BEGINNING,
    pb.START_POSITION_LIVE: Start.LIVE,
    pb.START_POSITION_GROUP: Start.GROUP,
}
_STATES = {
    DeliveryState.ACTIVE: pb.STREAM_STATE_ACTIVE,
    DeliveryState.PAUSED: pb.STREAM_STATE_PAUSED,
    DeliveryState.EXHAUSTED: pb.STREAM_STATE_EXHAUSTED,
    DeliveryState.DRAINING: pb.STREAM_STATE_DRAINING,
    DeliveryState.WAITING_FOR_GROUP: pb.STREAM_STATE_WAITING_FOR_GROUP,
}
_LEAVING = (pb.RELEASE_REASON_SHUTDOWN, pb.RELEASE_REASON_PAUSE)
_PACK_AT_FAULT = (pb.RELEASE_REASON_PACK_NOT_FINITE, pb.RELEASE_REASON_PACK_CORRUPT)


class HiddenStateService(HiddenStateServiceServicer):
    """The trainer-facing service. `read_payload` serves ReadPayload; the rest are its RPCs by name."""

    def __init__(self, ledger: LeaseLedger, readiness: Readiness, max_polls: int) -> None:
        """`max_polls`: so many threads may wait in LeasePacks; one more gets its empty answer at once."""
        self._ledger = ledger
        self._readiness = readiness
        self._polls = threading.BoundedSemaphore(max_polls)

    def GetTarget(self, request: pb.GetTargetRequest, context: grpc.ServicerContext) -> pb.GetTargetResponse:
        """The handshake."""
        if request.protocol_version != PROTOCOL_VERSION:
            raise SlipstreamError(
                f"The trainer speaks protocol {request.protocol_version}, this target server {PROTOCOL_VERSION}.",
                reason=Reason.PROTOCOL_MISMATCH,
                remedy="Install the same version of Slipstream on both sides.",
            )
        return self._readiness.target_for_new_runs().handshake

    def OpenSubscription(
        self, request: pb.OpenSubscriptionRequest, context: grpc.ServicerContext
    ) -> pb.OpenSubscriptionResponse:
        """Open the stream if needed, then the run's subscription."""
        served = self._readiness.target_for_new_runs()
        terms = _terms(request)
        stream = served.catalog.open(terms)
        end = stream.end(terms.max_epochs)
        record = self._ledger.open(terms, stream.name, served.fingerprint, end)
        log_event(
            _log, "info", "subscription_opened", subscription=record.name, stream=record.stream,
            incarnation=record.incarnation, first_sequence_number=record.first_sequence_number, end=end,
        )  # fmt: skip
        return pb.OpenSubscriptionResponse(
            subscription=record.name,
            stream=record.stream,
            incarnation=record.incarnation,
            first_sequence_number=record.first_sequence_number,
            total_packs=0 if end is None else max(0, end - record.first_sequence_number),
            data_report_json=stream.data_report_json,
        )

    def SeekSubscription(
        self, request: pb.SeekSubscriptionRequest, context: grpc.ServicerContext
    ) -> pb.SeekSubscriptionResponse:
        """A new incarnation at the cursor of a checkpoint."""
        self._reopen(self._readiness.target_for_new_runs(), request.subscription, wait=True)
        to = SeekTo(
            next_step=request.next_step,
            first_sequence_number=request.first_sequence_number,
            expected_incarnation=request.expected_incarnation,
            lineage_incarnation=request.lineage_incarnation,
            quarantined=frozenset(request.quarantined_sequence_numbers),
            request_id=request.request_id,
        )
        incarnation = self._ledger.seek(request.subscription, to)
        log_event(
            _log, "info", "subscription_sought", subscription=request.subscription, incarnation=incarnation,
            next_step=to.next_step,
        )  # fmt: skip
        return pb.SeekSubscriptionResponse(incarnation=incarnation)

    def LeasePacks(self, request: pb.LeasePacksRequest, context: grpc.ServicerContext) -> pb.LeasePacksResponse:
        """Long poll for the run's next packs."""
        served = self._readiness.target()
        if request.target_fingerprint != served.fingerprint:
            raise SlipstreamError(
                f"{request.subscription} was trained on target {request.target_fingerprint}; this server's target is "
                f"{served.handshake.model_id} with {served.fingerprint}.",
                reason=Reason.TARGET_FINGERPRINT_MISMATCH,
                remedy="Serve the model, revision and dtype the run began with, or choose another run name.",
            )
        self._reopen(served, request.subscription, wait=False)
        context.add_callback(self._ledger.wake)
        may_wait = self._polls.acquire(blocking=False)
        try:
            ask = Ask(
                incarnation=request.incarnation,
                max_packs=max(1, request.max_packs),
                max_wait=min(_seconds(request.max_wait), LONGEST_POLL_SECONDS) if may_wait else 0.0,
                time_to_live=_seconds(request.time_to_live),
                end=request.end_sequence_number or None,
            )
            grant = self._ledger.lease(request.subscription, ask, cancelled=lambda: not context.is_active())
        finally:
            if may_wait:
                self._polls.release()
        checksums = request.transport in (pb.TRANSPORT_UNSPECIFIED, pb.TRANSPORT_GRPC)
        return pb.LeasePacksResponse(
            leases=_lease_messages(served, grant.leases, checksums=checksums),
            stream_state=_STATES[grant.state],
            quarantined_sequence_numbers=grant.quarantined,
        )

    def read_payload(self, token: bytes) -> OpenPayload:
        """The payload source of ReadPayload: a leased pack, the frozen weights or the probe."""
        return open_payload(self._readiness.target(), self._ledger, token)

    def ConfirmRead(self, request: pb.ConfirmReadRequest, context: grpc.ServicerContext) -> pb.ConfirmReadResponse:
        """After the copy, before the use."""
        return pb.ConfirmReadResponse(valid=self._ledger.confirm(request.lease_token, request.slot_generation))

    def RenewLeases(self, request: pb.RenewLeasesRequest, context: grpc.ServicerContext) -> pb.RenewLeasesResponse:
        """Keep leases."""
        lost, state = self._ledger.renew(request.lease_tokens, _seconds(request.time_to_live))
        known = pb.STREAM_STATE_UNSPECIFIED if state is None else _STATES[state]
        return pb.RenewLeasesResponse(lost_lease_tokens=lost, stream_state=known)

    def ReleaseLeases(
        self, request: pb.ReleaseLeasesRequest, context: grpc.ServicerContext
    ) -> pb.ReleaseLeasesResponse:
        """Give leases back; with a subscription and a reason to go, the run leaves."""
        for lease in self._ledger.release(request.lease_tokens, pack_at_fault=request.reason in _PACK_AT_FAULT):
            pack = self._readiness.target().catalog.get(lease.stream).sequence.pack(lease.sequence_number)
            log_event(
                _log, "warning", "pack_quarantined", stream=lease.stream, subscription=lease.subscription,
                sequence_number=lease.sequence_number, why=pb.ReleaseReason.Name(request.reason),
                documents=pack.document_names,
            )  # fmt: skip
        if request.subscription and request.reason in _LEAVING:
            self._ledger.leave(request.subscription, request.incarnation)
        return pb.ReleaseLeasesResponse()

    def CommitStep(self, request: pb.CommitStepRequest, context: grpc.ServicerContext) -> pb.CommitStepResponse:
        """A step is applied."""
        quarantined = self._ledger.commit(request.subscription, request.incarnation, request.step)
        return pb.CommitStepResponse(quarantined_sequence_numbers=quarantined)

    def _reopen(self, served: ServedTarget, subscription: str, *, wait: bool) -> None:
        """Put the subscription's stream on a shelf again, after a restart or after it was idle.

        Data may take longer to read than a poll may last. Who asks again every few seconds must not `wait` for whoever
        reads them: before long, no thread was left for anybody.
        """
        name, terms = self._ledger.wanted_by(subscription)
        if not served.catalog.serves(name, terms):
            stream = served.catalog.open(terms, wait=wait)
            self._ledger.open(terms, stream.name, served.fingerprint, stream.end(terms.max_epochs))


def _terms(request: pb.OpenSubscriptionRequest) -> SubscriptionTerms:
    kind, _, run = request.run.partition("/")
    if kind != "runs" or not is_name(run):
        raise SlipstreamError(
            f"{request.run!r} is not the name of a run.",
            reason=Reason.SPEC_INVALID,
            remedy=f"Expected runs/NAME. {NAME_RULE}",
        )
    if request.packs_per_step < 1 or not 0 <= request.max_epochs <= MAX_EPOCHS:
        raise SlipstreamError(
            f"packs_per_step is {request.packs_per_step} and max_epochs {request.max_epochs}; expected at least 1 "
            f"and 0 to {MAX_EPOCHS}.",
            reason=Reason.SPEC_INVALID,
        )
    start = _STARTS.get(request.start_position)
    if start is None:
        raise SlipstreamError(
            f"There is no start position {request.start_position}.",
            reason=Reason.SPEC_INVALID,
            remedy="Install the same version of Slipstream on both sides.",
        )
    return SubscriptionTerms(
        run=run,
        data_spec_json=request.data_spec_json,
        layer_ids=tuple(sorted(set(request.layer_ids))),
        last_hidden_state=request.last_hidden_state,
        packs_per_step=request.packs_per_step,
        start=start,
        group=request.group if start is Start.GROUP else "",
        group_size=request.group_size if start is Start.GROUP else 0,
        max_epochs=request.max_epochs,
    )


def _lease_messages(served: ServedTarget, leases: Iterable[Lease], *, checksums: bool) -> list[batch_pb2.Lease]:
    """Without those whose arena was given back meanwhile: they are void, and their packs are delivered again."""
    messages = []
    for lease in leases:
        described = served.catalog.get(lease.stream).describe(lease, checksums=checksums)
        if described is None:
            continue
        manifest, locations = described
        messages.append(
            batch_pb2.Lease(
                lease_token=lease.token,
                manifest=manifest,
                step=lease.step,
                time_to_live=_duration(lease.time_to_live),
                delivery_attempt=lease.attempt,
                locations=locations,
            )
        )
    return messages


def _seconds(duration: Duration) -> float:
    return max(0.0, duration.seconds + duration.nanos / 1e9)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(round(1000 * seconds))
    return duration
