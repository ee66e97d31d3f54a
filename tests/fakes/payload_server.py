"""The wire without a model behind it: a real arena and a real gRPC server that hold what a test puts into slots.

As a process (`python -m tests.fakes.payload_server DIRECTORY NUM_BYTES`) it prints one line: its address, then the
lease and the host id in hexadecimal; it stalls at the third chunk of a read and says so with a second line.
"""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch
from google.protobuf.duration_pb2 import Duration

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.hidden_states.v1.hidden_state_service_pb2_grpc import HiddenStateServiceServicer
from slipstream.run_spec.reasons import Reason
from slipstream.wire.arena import PayloadArena, create_host_id
from slipstream.wire.channel import SERVER_OPTIONS
from slipstream.wire.codec import ByteArray, checksum, plan_layout, write_tensor
from slipstream.wire.status import StatusInterceptor
from slipstream.wire.transports.grpc import OpenPayload, add_hidden_state_service


@dataclass
class _Entry:
    slot: int
    generation: int
    size_bytes: int


class PayloadServer:
    """Serves the payloads that `put` wrote; a token counts until its slot is written again."""

    def __init__(self, directory: Path | None, *, num_slots: int = 2, slot_bytes: int = 2**20) -> None:
        self.arena = PayloadArena.create(num_slots, slot_bytes, directory=directory)
        self.host_id = create_host_id(directory) if directory is not None else ""
        self.on_chunk: Callable[[int], None] = lambda _: None
        """Called with the number of the chunk, counted over all streams, after it was copied."""
        self.on_open: Callable[[ByteArray], ByteArray] = lambda buffer: buffer
        """What a stream reads instead of the slot."""
        self._tokens = itertools.count(1)
        self._chunks = itertools.count(1)
        self._entries: dict[bytes, _Entry] = {}
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Serve; after `stop_serving` again at the same port, with the same tokens."""
        self._server = grpc.server(ThreadPoolExecutor(4), interceptors=[StatusInterceptor()], options=SERVER_OPTIONS)
        add_hidden_state_service(self._server, HiddenStateServiceServicer(), self._open)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop_serving(self) -> threading.Event:
        """Break every stream; the event is set when the port is free."""
        stopped: threading.Event = self._server.stop(0)
        return stopped

    def close(self) -> None:
        self.stop_serving().wait(10)
        self.arena.close()

    def put(self, slot: int, tensors: Mapping[str, torch.Tensor], *, seconds: float = 30.0) -> batch_pb2.Lease:
        """Write a payload with checksums into a slot and lease it."""
        layout = plan_layout([(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()])
        buffer = self.arena.slot(slot)
        self.arena.begin_write(slot)
        for spec in layout.specs:
            write_tensor(buffer, spec, tensors[spec.name])
            spec.crc32c = checksum(buffer[spec.offset_bytes : spec.offset_bytes + spec.size_bytes])
        self.arena.end_write(slot)
        token = str(next(self._tokens)).encode()
        self._entries[token] = _Entry(slot, self.arena.generation(slot), layout.size_bytes)
        locations = [batch_pb2.PayloadLocation(grpc=batch_pb2.GrpcLocation())]
        shared_memory = self.arena.location(slot)
        if shared_memory is not None:
            locations.append(batch_pb2.PayloadLocation(shared_memory=shared_memory))
        return batch_pb2.Lease(
            lease_token=token,
            manifest=batch_pb2.PackManifest(tensors=layout.specs, payload_size_bytes=layout.size_bytes),
            time_to_live=Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9)),
            locations=locations,
        )

    def target(self, probe: batch_pb2.Lease) -> pb.GetTargetResponse:
        """What GetTarget would answer, with a leased payload as the probe."""
        fixed = pb.FixedPayload(token=probe.lease_token, manifest=probe.manifest, locations=probe.locations)
        return pb.GetTargetResponse(protocol_version=1, host_id=self.host_id, probe=fixed)

    def _open(self, token: bytes) -> OpenPayload:
        entry = self._entries.get(token)
        if entry is None or self.arena.generation(entry.slot) != entry.generation:
            raise SlipstreamError("This lease does not count any more.", reason=Reason.LEASE_LOST)
        return OpenPayload(
            self.on_open(self.arena.slot(entry.slot)[: entry.size_bytes]), lambda: self._still_valid(entry)
        )

    def _still_valid(self, entry: _Entry) -> bool:
        self.on_chunk(next(self._chunks))
        return self.arena.generation(entry.slot) == entry.generation


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _main(directory: str, num_bytes: str) -> None:
    server = PayloadServer(Path(directory), slot_bytes=int(num_bytes))
    lease = server.put(0, {"x": torch.arange(int(num_bytes), dtype=torch.uint8)}, seconds=1.0)

    def stall(chunk: int) -> None:
        if chunk == 3:
            _say("stalled")
            threading.Event().wait(60)

    server.on_chunk = stall
    _say(f"{server.address} {lease.SerializeToString().hex()} {server.host_id.encode().hex()}")
    sys.stdin.read()
    server.close()


def start_payload_server(directory: Path, num_bytes: int) -> "subprocess.Popen[str]":
    """This module as a process, which imports what the caller imports: the sources, or the installed wheel."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(directory), str(num_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


if __name__ == "__main__":
    _main(*sys.argv[1:])
