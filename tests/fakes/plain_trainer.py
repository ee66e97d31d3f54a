"""A trainer that learns nothing: it leases, reads, confirms and commits, and keeps what it read."""

from dataclasses import dataclass, field

import torch

from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1 import stream_admin_service_pb2 as admin_pb
from slipstream.wire.channel import TargetClient
from slipstream.wire.transports import PayloadReader, PayloadRef, choose_reader
from tests.fakes.served_model import LAYERS

Tensors = dict[str, torch.Tensor]


@dataclass
class Trainer:
    """What a trainer does between two steps: lease, read, confirm, commit."""

    client: TargetClient
    run: str
    data: str
    transport: str = "shm"
    group: str = ""
    epochs: int = 1
    layers: tuple[int, ...] = LAYERS
    last_hidden_state: bool = True
    lease_seconds: int = 30
    packs: dict[int, Tensors] = field(default_factory=dict)
    incarnation: int = 0
    state: int = pb.STREAM_STATE_UNSPECIFIED

    def join(self, next_step: int = 0) -> pb.OpenSubscriptionResponse:
        self.target = self.client.get_target()
        self.reader: PayloadReader = choose_reader(self.transport, self.target, self.client.channel)  # type: ignore[arg-type]
        self.opened = self.client.open_subscription(
            pb.OpenSubscriptionRequest(
                run=f"runs/{self.run}",
                data_spec_json=self.data,
                layer_ids=self.layers,
                last_hidden_state=self.last_hidden_state,
                packs_per_step=1,
                max_epochs=self.epochs,
                start_position=pb.START_POSITION_GROUP if self.group else pb.START_POSITION_BEGINNING,
                group=self.group,
                group_size=2 if self.group else 0,
            )
        )
        sought = self.client.seek_subscription(
            pb.SeekSubscriptionRequest(
                subscription=self.opened.subscription,
                next_step=next_step,
                expected_incarnation=self.opened.incarnation,
                lineage_incarnation=self.incarnation,
                first_sequence_number=self.opened.first_sequence_number,
            )
        )
        self.incarnation = sought.incarnation
        return self.opened

    def lease(self, packs: int = 2, max_wait: int = 10) -> pb.LeasePacksResponse:
        request = pb.LeasePacksRequest(
            subscription=self.opened.subscription,
            incarnation=self.incarnation,
            max_packs=packs,
            target_fingerprint=self.target.target_fingerprint,
            transport=self.reader.transport,
        )
        request.max_wait.seconds, request.time_to_live.seconds = max_wait, self.lease_seconds
        response = self.client.lease_packs(request)
        self.state = response.stream_state
        return response

    def read(self, lease) -> Tensors:
        return self.reader.read(PayloadRef.of_lease(lease), [spec.name for spec in lease.manifest.tensors])

    def confirm(self, lease) -> bool:
        generation = PayloadRef.of_lease(lease).slot_generation
        return self.client.confirm_read(
            pb.ConfirmReadRequest(lease_token=lease.lease_token, slot_generation=generation)
        ).valid

    def commit(self, step: int) -> None:
        self.client.commit_step(
            pb.CommitStepRequest(subscription=self.opened.subscription, incarnation=self.incarnation, step=step)
        )

    def train(self, until: int | None = None) -> None:
        """Take packs, in order, and commit each as a step: all there are, or those below `until`."""
        while until is None or len(self.packs) < until:
            response = self.lease(packs=2 if until is None else min(2, until - len(self.packs)))
            if response.stream_state == pb.STREAM_STATE_EXHAUSTED:
                return
            for lease in response.leases:
                number = lease.manifest.sequence_number
                assert number == lease.step == len(self.packs)
                tensors = self.read(lease)
                assert self.confirm(lease)
                self.packs[number] = tensors
                self.commit(number)

    def stats(self) -> admin_pb.GetStreamStatsResponse:
        return self.client.get_stream_stats(admin_pb.GetStreamStatsRequest(stream=self.opened.stream))


def assert_same(left: dict[int, Tensors], right: dict[int, Tensors]) -> None:
    assert left.keys() == right.keys()
    for number, tensors in left.items():
        assert tensors.keys() == right[number].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, right[number][name]), f"pack {number}, {name}"
