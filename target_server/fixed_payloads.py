"""Payloads that exist as long as the server does: the frozen weights, and the probe for measuring transports."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from slipstream.hidden_states.v1 import batch_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.wire.arena import PayloadArena
from slipstream.wire.codec import ByteArray, PayloadLayout, checksum, plan_layout, write_tensor
from target_server.stream import payload_locations

PROBE_BYTES = 64 * 2**20


class FixedPayloadStore:
    """A few named payloads, each in an arena of its own."""

    def __init__(self, directory: Path | None) -> None:
        """`directory`: of shared memory; None for memory of this process only."""
        self._directory = directory
        self._arenas: dict[bytes, tuple[PayloadArena, int]] = {}

    def add(self, name: str, tensors: Mapping[str, torch.Tensor]) -> pb.FixedPayload:
        """Copy tensors into a new payload; returns what a trainer needs to read it.

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED when the memory is not there.
        """
        layout = plan_layout([(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()])

        def write(arena: PayloadArena) -> bool:
            for spec in layout.specs:
                write_tensor(arena.slot(0), spec, tensors[spec.name])
            return True

        payload = self.add_written(name, layout, write)
        assert payload is not None
        return payload

    def add_written(
        self, name: str, layout: PayloadLayout, write: Callable[[PayloadArena], bool]
    ) -> pb.FixedPayload | None:
        """As `add`, of tensors that are laid out and that `write` puts into slot 0; None: it says that it could not.

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED when the memory is not there.
        """
        arena = PayloadArena.create(1, layout.size_bytes, directory=self._directory)
        arena.begin_write(0)
        if not write(arena):
            arena.close()
            return None
        slot = arena.slot(0)
        for spec in layout.specs:
            spec.crc32c = checksum(slot[spec.offset_bytes : spec.offset_bytes + spec.size_bytes])
        arena.end_write(0)
        token = f"fixed/{name}".encode()
        self._arenas[token] = (arena, layout.size_bytes)
        manifest = batch_pb2.PackManifest(tensors=layout.specs, payload_size_bytes=layout.size_bytes)
        return pb.FixedPayload(token=token, manifest=manifest, locations=payload_locations(arena, 0))

    def find(self, token: bytes) -> ByteArray | None:
        """The payload's bytes; None for any other token."""
        found = self._arenas.get(token)
        return None if found is None else found[0].slot(0)[: found[1]]

    def close(self) -> None:
        """Give the memory back."""
        for arena, _ in self._arenas.values():
            arena.close()
        self._arenas.clear()


def probe_tensor(size_bytes: int) -> torch.Tensor:
    """Bytes that no compression or page sharing makes easy; uint8 `[size_bytes]`, the same in every server."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)
