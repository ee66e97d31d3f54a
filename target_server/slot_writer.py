"""④→⑤ A pack's tensors into its slot, while the device goes on to the next pack.

On CUDA the copy runs on a stream of its own into the slot itself, whose memory is page-locked: the hidden states are
copied once on their way to a trainer's process. On the CPU it is an ordinary copy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.hidden_states.v1 import tensor_pb2
from slipstream.wire.codec import ByteArray, PayloadLayout, view_tensor, write_tensor
from target_server.state_cache_part import Rows


class Slots(Protocol):
    """Memory in slots, as of a PayloadArena: this process's own, or another's that it has mapped."""

    def slot(self, index: int) -> ByteArray:
        """As PayloadArena."""

    def generation(self, index: int) -> int:
        """As PayloadArena."""

    def begin_write(self, index: int) -> None:
        """As PayloadArena."""

    def end_write(self, index: int) -> None:
        """As PayloadArena."""


class SlotMemory(Protocol):
    """Where the packs of a stream lie."""

    @property
    def arena(self) -> Slots: ...
    @property
    def layout(self) -> PayloadLayout: ...


@dataclass(frozen=True)
class SlotWrite:
    """A write that may still be under way."""

    arena: Slots
    slot_index: int
    finite: Tensor
    """Bool `[]` on the host: no hidden state is NaN or infinite. Valid once `done`."""
    done: torch.cuda.Event | None
    """None: everything is done already."""

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        return self.done is None or self.done.query()

    def finish(self) -> bool:
        """Wait for the copies and close the slot; true when the hidden states are finite."""
        if self.done is not None:
            self.done.synchronize()
        self.arena.end_write(self.slot_index)
        return bool(self.finite)


class SlotWriter:
    """Writes payloads into slots of arenas. For the thread that runs the target."""

    def __init__(self, device: torch.device) -> None:
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(
        self,
        stream: SlotMemory,
        slot_index: int,
        host: Mapping[str, Tensor],
        states: Mapping[str, Tensor],
        rows: Rows | None = None,
    ) -> SlotWrite:
        """Write `host` tensors now, and `states` when the device has computed them.

        Args:
            stream: whose arena and layout.
            slot_index: reserved for this pack.
            host: tensors in memory.
            states: at least one hidden state, on the device; nobody writes into them afterwards.
            rows: where the states of a part of the pack belong; the slot's other rows stay as they are.
        """
        finite = _all_finite(states.values())
        stream.arena.begin_write(slot_index)
        slot = stream.arena.slot(slot_index)
        specs = {spec.name: spec for spec in stream.layout.specs}
        for name, tensor in host.items():
            write_tensor(slot, specs[name], tensor)
        if self._copies is None:
            for name, state in states.items():
                _write_rows(slot, specs[name], state, rows)
            return SlotWrite(stream.arena, slot_index, finite, None)
        answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        done = torch.cuda.Event()
        self._copies.wait_stream(torch.cuda.current_stream(self._copies.device))
        with torch.cuda.stream(self._copies):
            for name, state in states.items():
                _write_rows(slot, specs[name], state, rows)
            answer.copy_(finite, non_blocking=True)
            done.record()
        for tensor in (finite, *states.values()):
            tensor.record_stream(self._copies)
        return SlotWrite(stream.arena, slot_index, answer, done)


def _write_rows(slot: ByteArray, spec: tensor_pb2.TensorSpec, state: Tensor, rows: Rows | None) -> None:
    """Write a layer's states; from a GPU, leave the copies to the current CUDA stream."""
    if rows is None:
        write_tensor(slot, spec, state, non_blocking=state.is_cuda)
        return
    whole = view_tensor(slot, spec)
    for here, there in rows:
        whole[there].copy_(state[here], non_blocking=state.is_cuda)


def _all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Bool `[]`: neither NaN nor infinite anywhere. No temporary of a tensor's size: both extremes propagate NaN."""
    extremes = torch.stack([extreme for tensor in tensors for extreme in torch.aminmax(tensor)])
    return torch.isfinite(extremes).all()
