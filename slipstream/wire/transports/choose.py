"""Which transport a trainer uses: what it asked for, or the best one that both ends share; measured, and said."""

import logging
import threading
import time
from typing import Literal

import grpc
import torch

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from slipstream.wire.codec import checksum
from slipstream.wire.transports.base import PayloadReader, PayloadRef
from slipstream.wire.transports.grpc import GrpcReader
from slipstream.wire.transports.shm import SharedMemoryReader

FLOORS_GIGABYTES_PER_SECOND = {"shm": 0.1, "grpc": 0.01}
"""Below this a transport that was asked for by name is refused: it is not what its name says (swap, a broken link)."""

_PROBE_READS = 2  # the first also pays for connection and page tables
_log = logging.getLogger(__name__)

TransportName = Literal["auto", "grpc", "shm"]


def choose_reader(
    requested: TransportName,
    target: pb.GetTargetResponse,
    channel: grpc.Channel,
    *,
    stop: threading.Event | None = None,
    pin_memory: bool = False,
) -> PayloadReader:
    """Take the first transport that works, shared memory before gRPC, and measure it with the server's probe payload.

    Args:
        requested: `auto` prefers shared memory and logs why it is not used; a name means this one or an error.
        target: the server's answer to GetTarget.
        channel: to the server.
        stop: set it to end waiting for an absent server.
        pin_memory: as PayloadReader.

    Raises:
        SlipstreamError: TRANSPORT_UNAVAILABLE when the requested transport is impossible or slower than its floor.
    """
    probe = PayloadRef.of_fixed(target.probe)
    reader = None if requested == "grpc" else _shared_memory(target, probe, requested, pin_memory=pin_memory)
    if reader is None:
        reader = GrpcReader(channel, stop=stop, pin_memory=pin_memory)
        _probe(reader, probe)
    if requested != "auto":
        _refuse_below_floor(reader)
    log_event(_log, "info", "transport_chosen", transport=reader.name, requested=requested)
    return reader


def _shared_memory(
    target: pb.GetTargetResponse, probe: PayloadRef, requested: TransportName, *, pin_memory: bool
) -> PayloadReader | None:
    """The measured reader; None where memory is not shared and another transport will do."""
    try:
        reader = SharedMemoryReader(target.host_id, pin_memory=pin_memory)
        _probe(reader, probe)
    except SlipstreamError as error:
        if requested != "auto" or error.reason is not Reason.TRANSPORT_UNAVAILABLE:
            raise
        log_event(_log, "info", "transport_not_used", transport="shm", reason=error.reason, message=error.message)
        return None
    return reader


def _probe(reader: PayloadReader, probe: PayloadRef) -> None:
    """Measure `reader.gigabytes_per_second` (10^9 bytes, best of two reads) and make sure the bytes are right."""
    names = [spec.name for spec in probe.manifest.tensors]
    best = float("inf")
    try:
        for attempt in range(_PROBE_READS):
            started = time.perf_counter()
            tensors = reader.read(probe, names)
            best = min(best, time.perf_counter() - started)
            if attempt + 1 < _PROBE_READS:
                del tensors  # its memory is used again, as that of packs is
        for spec in probe.manifest.tensors:
            if spec.crc32c and checksum(tensors[spec.name].flatten().view(torch.uint8).numpy()) != spec.crc32c:
                raise SlipstreamError(
                    f"The probe read over {reader.name} is not what the server wrote.", reason=Reason.PAYLOAD_CORRUPT
                )
    except SlipstreamError:
        reader.close()
        raise
    reader.gigabytes_per_second = probe.manifest.payload_size_bytes / best / 1e9
    log_event(
        _log,
        "info",
        "transport_probe",
        transport=reader.name,
        bytes=probe.manifest.payload_size_bytes,
        gigabytes_per_second=round(reader.gigabytes_per_second, 3),
    )


def _refuse_below_floor(reader: PayloadReader) -> None:
    floor, found = FLOORS_GIGABYTES_PER_SECOND[reader.name], reader.gigabytes_per_second
    assert found is not None
    if found < floor:
        reader.close()
        raise SlipstreamError(
            f"Transport {reader.name} moves {found:.3f} GB/s; its floor is {floor} GB/s.",
            reason=Reason.TRANSPORT_UNAVAILABLE,
            remedy='Look for swapping or a slow link, or set stream.transport = "auto".',
        )
