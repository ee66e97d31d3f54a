"""A target that is loaded and ready to be served: the model's facts, its streams, its fixed payloads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slipstream import __version__
from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.wire.arena import create_host_id
from slipstream.wire.channel import PROTOCOL_VERSION
from slipstream.wire.codec import plan_layout
from slipstream.wire.transports.grpc import OpenPayload
from target_server.fixed_payloads import FixedPayloadStore, probe_tensor
from target_server.lease_ledger import LeaseLedger
from target_server.producer import Throughput
from target_server.streams import StreamCatalog
from target_server.target_view import TargetView


class PackMaker(Protocol):
    """Computes what the work queue asks for: the Producer of this process, or the EnginePool."""

    @property
    def throughput(self) -> Throughput: ...
    def run(self) -> None:
        """Until the end."""


@dataclass(frozen=True)
class ServedTarget:
    """What the services need once the model is loaded."""

    fingerprint: str
    handshake: pb.GetTargetResponse
    catalog: StreamCatalog
    producer: PackMaker
    fixed: FixedPayloadStore

    def close(self) -> None:
        """Give all shared memory back."""
        self.catalog.close()
        self.fixed.close()


def describe_target(
    target: TargetView,
    fixed: FixedPayloadStore,
    frozen_weights: pb.FixedPayload,
    *,
    shm_dir: Path | None,
    probe_bytes: int,
    max_outstanding: int,
) -> pb.GetTargetResponse:
    """The answer to GetTarget; makes the probe.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED when the memory for them is not there.
    """
    (hidden_state_spec,) = plan_layout([("hidden_states", target.dtype, (1,))]).specs
    return pb.GetTargetResponse(
        protocol_version=PROTOCOL_VERSION,
        server_version=__version__,
        model_id=target.model_id,
        model_revision=target.revision or "",
        target_fingerprint=target.fingerprint,
        num_layers=target.config.num_layers,
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        hidden_state_data_type=hidden_state_spec.data_type,
        max_outstanding_leases=max_outstanding,
        host_id=create_host_id(shm_dir) if shm_dir is not None else "",
        probe=fixed.add("probe", {"probe": probe_tensor(probe_bytes)}),
        frozen_weights=frozen_weights,
        target_config_json=target.config.canonical_json(),
    )


def open_payload(served: ServedTarget, ledger: LeaseLedger, token: bytes) -> OpenPayload:
    """The bytes that a token stands for: a fixed payload, or a leased pack.

    Raises:
        SlipstreamError: LEASE_LOST, INCARNATION_STALE, STREAM_CLOSED.
    """
    fixed = served.fixed.find(token)
    if fixed is not None:
        return OpenPayload(fixed, lambda: True)
    lease = ledger.reading(token)
    buffer = served.catalog.get(lease.stream).payload(lease)
    if buffer is None:
        raise SlipstreamError(
            "The pack's shelf was exchanged.", reason=Reason.LEASE_LOST, remedy="The pack will be delivered again."
        )
    # No slot is rewritten under a lease that is in the book.
    return OpenPayload(buffer, lambda: ledger.holds(token))
