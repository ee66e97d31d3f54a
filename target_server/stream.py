"""④→⑦ One stream that is on a shelf: its packs, where they lie, and what a trainer is told of them."""

import threading
from dataclasses import dataclass, field

from slipstream.hidden_states.v1 import batch_pb2, tensor_pb2
from slipstream.wire.arena import PayloadArena
from slipstream.wire.codec import ByteArray, PayloadLayout, checksum
from slipstream.wire.page_lock import unlock_pages
from target_server.packing import PackSequence
from target_server.stream_layers import Layers
from target_server.subscription import Lease

SMALL_TENSORS = ("input_ids", "loss_mask", "document_ids", "position_ids")
"""What packs hold besides hidden states."""


@dataclass(frozen=True)
class Stream:
    """One stream that is on a shelf."""

    name: str
    layers: Layers
    sequence: PackSequence
    layout: PayloadLayout
    arena: PayloadArena
    data_report_json: str
    pack_tokens: int
    _guard: threading.Lock = field(default_factory=threading.Lock)
    """Held while the arena is looked at by threads that no lease protects, or closed."""
    _checksums: dict[int, tuple[int, dict[str, int]]] = field(default_factory=dict)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Zero-based, ascending."""
        return self.layers.ids

    @property
    def last_hidden_state(self) -> bool:
        """Whether packs hold the last layer's output, too."""
        return self.layers.last_hidden_state

    def end(self, max_epochs: int) -> int | None:
        """One past the last pack of so many epochs; None for 0, which means for ever."""
        return self.sequence.total_packs(max_epochs) if max_epochs else None

    def describe(
        self, lease: Lease, *, checksums: bool
    ) -> tuple[batch_pb2.PackManifest, tuple[batch_pb2.PayloadLocation, ...]] | None:
        """What a trainer must know of a leased pack, and where it lies; None: the arena was given back meanwhile.

        Args:
            lease: on a slot of this stream's arena; one on another arena is void and gives what nobody can confirm.
            checksums: of all tensors, for a transport that needs them; else of the small ones only.
        """
        with self._guard:
            if self.arena.is_closed or lease.slot.index >= self.arena.num_slots:
                return None
            sums = self._checksums_of(lease.slot.index, lease.facts.generation, everything=checksums)
            locations = payload_locations(self.arena, lease.slot.index)
        specs = tuple(_with_checksum(spec, sums.get(spec.name, 0)) for spec in self.layout.specs)
        manifest = batch_pb2.PackManifest(
            sequence_number=lease.sequence_number,
            tensors=specs,
            payload_size_bytes=self.layout.size_bytes,
            num_tokens=lease.facts.num_tokens,
            num_supervised_tokens=lease.facts.num_supervised_tokens,
        )
        return manifest, locations

    def payload(self, lease: Lease) -> ByteArray | None:
        """The bytes that a lease lets a trainer read; None: the arena was given back meanwhile."""
        with self._guard:
            if self.arena.is_closed or lease.slot.index >= self.arena.num_slots:
                return None
            return self.arena.slot(lease.slot.index)[: self.layout.size_bytes]

    def on(self, arena: PayloadArena, layout: PayloadLayout, layers: Layers) -> "Stream":
        """The same packs in another arena."""
        return Stream(self.name, layers, self.sequence, layout, arena, self.data_report_json, self.pack_tokens)

    def close(self) -> None:
        """Give the arena's memory back; who reads from it now is refused when it confirms."""
        with self._guard:
            unlock_pages(self.arena.slots())
            self.arena.close()

    def _checksums_of(self, slot_index: int, generation: int, *, everything: bool) -> dict[str, int]:
        """Computed once per content of a slot, those of hidden states only when a reader needs them."""
        found, known = self._checksums.get(slot_index, (generation, dict[str, int]()))
        sums = dict(known) if found == generation else {}
        slot = self.arena.slot(slot_index)
        for spec in self.layout.specs:
            if spec.name not in sums and (everything or spec.name in SMALL_TENSORS):
                sums[spec.name] = checksum(slot[spec.offset_bytes : spec.offset_bytes + spec.size_bytes])
        if self.arena.generation(slot_index) == generation:
            self._checksums[slot_index] = (generation, sums)
        return sums


def payload_locations(arena: PayloadArena, slot_index: int) -> tuple[batch_pb2.PayloadLocation, ...]:
    """gRPC always; shared memory where the arena lies in it."""
    locations = [batch_pb2.PayloadLocation(grpc=batch_pb2.GrpcLocation())]
    shared = arena.location(slot_index)
    if shared is not None:
        locations.insert(0, batch_pb2.PayloadLocation(shared_memory=shared))
    return tuple(locations)


def _with_checksum(spec: tensor_pb2.TensorSpec, value: int) -> tensor_pb2.TensorSpec:
    copy = tensor_pb2.TensorSpec()
    copy.CopyFrom(spec)
    copy.crc32c = value
    return copy
