"""⑦ StreamAdminService: the control plane's verbs."""

# ruff: noqa: N802, ARG002 - names and arguments of RPCs are the contract's

import grpc

from slipstream.hidden_states.v1 import stream_admin_service_pb2 as pb
from slipstream.hidden_states.v1.stream_admin_service_pb2_grpc import StreamAdminServiceServicer
from target_server.readiness import Readiness
from target_server.stream_control import StreamControl, SubscriptionCounters


class StreamAdminService(StreamAdminServiceServicer):
    """Decodes, calls, encodes."""

    def __init__(self, control: StreamControl, readiness: Readiness) -> None:
        self._control = control
        self._readiness = readiness

    def PauseSubscription(
        self, request: pb.PauseSubscriptionRequest, context: grpc.ServicerContext
    ) -> pb.PauseSubscriptionResponse:
        """Stop granting leases to a run."""
        self._control.pause(request.subscription)
        return pb.PauseSubscriptionResponse()

    def ResumeSubscription(
        self, request: pb.ResumeSubscriptionRequest, context: grpc.ServicerContext
    ) -> pb.ResumeSubscriptionResponse:
        """Grant leases again."""
        self._control.resume(request.subscription)
        return pb.ResumeSubscriptionResponse()

    def CloseSubscription(
        self, request: pb.CloseSubscriptionRequest, context: grpc.ServicerContext
    ) -> pb.CloseSubscriptionResponse:
        """End a subscription."""
        self._control.close(request.subscription)
        return pb.CloseSubscriptionResponse()

    def GetStreamStats(
        self, request: pb.GetStreamStatsRequest, context: grpc.ServicerContext
    ) -> pb.GetStreamStatsResponse:
        """Counters of one stream."""
        throughput = self._readiness.target().producer.throughput
        counters = self._control.counters(request.stream, of_subscription=request.subscription)
        return pb.GetStreamStatsResponse(
            packs_ready=counters.packs_ready,
            shelf_size_bytes=counters.shelf_size_bytes,
            shelf_capacity_bytes=counters.shelf_capacity_bytes,
            packs_computed=counters.packs_computed,
            packs_recomputed=counters.packs_recomputed,
            target_tokens_per_second=throughput.tokens_per_second(counters.stream),
            subscriptions=[_subscription_stats(each) for each in counters.subscriptions],
            stream=counters.stream,
        )

    def DrainTarget(self, request: pb.DrainTargetRequest, context: grpc.ServicerContext) -> pb.DrainTargetResponse:
        """Stop granting leases; those that are out are finished. The process stays."""
        self._readiness.drain()
        self._control.drain()
        return pb.DrainTargetResponse()


def _subscription_stats(counters: SubscriptionCounters) -> pb.SubscriptionStats:
    return pb.SubscriptionStats(
        subscription=counters.name,
        packs_leased=counters.packs_leased,
        packs_committed=counters.packs_committed,
        leases_expired=counters.leases_expired,
        packs_quarantined=counters.packs_quarantined,
        lag_packs=counters.lag_packs,
        trainer_wait_ratio=counters.trainer_wait_ratio,
        trainer_wait_seconds=counters.trainer_wait_seconds,
        serving_seconds=counters.serving_seconds,
        paused=counters.paused,
    )
