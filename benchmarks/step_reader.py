"""A run that takes no time to train: it leases, reads, confirms and commits packs as a trainer does."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.hidden_states.v1 import batch_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.load import canonical_json
from slipstream.run_spec.spec import DataSpec
from slipstream.wire.channel import TargetClient
from slipstream.wire.transports import PayloadReader, PayloadRef

POLL_SECONDS = 20
LEASE_SECONDS = 60


@dataclass(frozen=True)
class Subscription:
    """What a run asks its target for; a step is one pack."""

    run: str
    data: DataSpec
    layer_ids: Sequence[int]
    last_hidden_state: bool = False
    group: str = ""
    """Runs of one group start together: none is served before all have subscribed."""
    group_size: int = 0
    first_step: int = 0


class StepReader:
    """One run. Every call is one step of the protocol, so that each can be timed."""

    def __init__(self, client: TargetClient, wanted: Subscription, reader: PayloadReader | None = None) -> None:
        """Subscribe; `reader`: how payloads are read, None for a run that never does."""
        self._client = client
        self._reader = reader
        self._fingerprint = client.get_target().target_fingerprint
        self._transport = reader.transport if reader is not None else pb.TRANSPORT_SHARED_MEMORY
        opened = client.open_subscription(
            pb.OpenSubscriptionRequest(
                run=f"runs/{wanted.run}",
                data_spec_json=canonical_json(wanted.data),
                layer_ids=wanted.layer_ids,
                last_hidden_state=wanted.last_hidden_state,
                packs_per_step=1,
                start_position=pb.START_POSITION_GROUP if wanted.group else pb.START_POSITION_BEGINNING,
                group=wanted.group,
                group_size=wanted.group_size,
            )
        )
        self._subscription, self._incarnation = opened.subscription, opened.incarnation
        self.seek(wanted.first_step)

    def seek(self, next_step: int) -> None:
        """Go on from a step; what is leased is void."""
        seek = pb.SeekSubscriptionRequest(
            subscription=self._subscription, expected_incarnation=self._incarnation, next_step=next_step
        )
        self._incarnation = self._client.seek_subscription(seek).incarnation

    def lease(self, max_packs: int = 1) -> Sequence[batch_pb2.Lease]:
        """The next packs, in order; waits for the first. The target computes what is missing of `max_packs`."""
        ask = pb.LeasePacksRequest(
            subscription=self._subscription,
            incarnation=self._incarnation,
            trainer="trainers/benchmark",
            max_packs=max_packs,
            target_fingerprint=self._fingerprint,
            transport=self._transport,
        )
        ask.max_wait.seconds, ask.time_to_live.seconds = POLL_SECONDS, LEASE_SECONDS
        return self._client.lease_packs(ask).leases

    def read(self, lease: batch_pb2.Lease) -> None:
        """Copy all tensors of the pack into this process, and forget them."""
        assert self._reader is not None
        self._reader.read(PayloadRef.of_lease(lease), [spec.name for spec in lease.manifest.tensors])

    def confirm(self, lease: batch_pb2.Lease) -> None:
        """What was read counts."""
        generation = PayloadRef.of_lease(lease).slot_generation
        confirm = pb.ConfirmReadRequest(lease_token=lease.lease_token, slot_generation=generation)
        assert self._client.confirm_read(confirm).valid, f"pack {lease.manifest.sequence_number} was not confirmed"

    def commit(self, step: int) -> None:
        """The step is trained, as it were."""
        commit = pb.CommitStepRequest(subscription=self._subscription, incarnation=self._incarnation, step=step)
        self._client.commit_step(commit)

    def leave(self) -> None:
        """The server need not wait for this run any more."""
        self._client.release_leases(
            pb.ReleaseLeasesRequest(
                reason=pb.RELEASE_REASON_SHUTDOWN, subscription=self._subscription, incarnation=self._incarnation
            )
        )
