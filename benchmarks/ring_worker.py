"""One end of a ring of packs in shared memory, in a process of its own: what writes into it, or what reads from it.

write  as the target server: from the device into a slot, two copies under way
read   as a trainer: from the slot to the device
Each end also copies plainly, without regard for the other: what the machine gives to both at the same time.

It obeys benchmarks/worker_process.py; the ends tell each other through a socket which slot is full and which is free.
"""

import argparse
import struct
import sys
import time
from collections import deque
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.worker_process import commands, reply
from drafter_trainer.device_copy import DeviceCopy
from slipstream.hidden_states.v1 import batch_pb2
from slipstream.wire.arena import PayloadArena, create_host_id, shared_memory_directory
from slipstream.wire.codec import PayloadLayout, plan_layout
from slipstream.wire.page_lock import lock_pages, unlock_pages
from slipstream.wire.transports import PayloadRef, SharedMemoryReader
from target_server.slot_writer import SlotWrite, SlotWriter

NUM_SLOTS = 8
LEAST_PACKS = 4 * NUM_SLOTS
PLAIN_PACKS = 4
LAYERS = 6
HIDDEN_SIZE = 4096
IN_FLIGHT = 2
"""Plain copies that are queued on a GPU at once."""
ROW = "last_hidden_state"
VALUE = 1.5
"""What every hidden state is: the reader looks at the end whether it arrived."""
_FULL = struct.Struct("<qq")  # slot, generation
_FREE = struct.Struct("<q")
_END = (-1, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("end", choices=("write", "read"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pack-mib", type=int, default=480)
    parser.add_argument("--socket", type=Path, required=True, help="the writer makes it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    end: Writer | Reader = Writer(args) if args.end == "write" else Reader(args)
    try:
        reply({"ready": True, "page_locked": end.page_locked})
        for asked in commands():
            meet(end.other)
            reply({"plain": end.plain.rate, "ring": end.ring}[asked["how"]](asked["seconds"]))
    finally:
        end.close()
    return 0


def layout_of(pack_mib: int) -> PayloadLayout:
    """Hidden states of about so many MiB in bfloat16, and one row."""
    tokens = max(1, pack_mib * 2**20 // (LAYERS * HIDDEN_SIZE * 2))
    shapes = {f"hidden_states.{layer}": (tokens, HIDDEN_SIZE) for layer in range(LAYERS)} | {ROW: (1, HIDDEN_SIZE)}
    return plan_layout([(name, torch.bfloat16, shape) for name, shape in shapes.items()])


class Writer:
    """The target's end; it owns the ring, and is what a SlotWriter writes into."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._device = torch.device(args.device)
        self.layout = layout_of(args.pack_mib)
        self.arena = PayloadArena.create(NUM_SLOTS, self.layout.size_bytes, directory=shared_memory_directory())
        self.page_locked = self._device.type == "cuda" and lock_pages(self.arena.slots(), effect="see the result")
        self._writer = SlotWriter(self._device)
        states = {
            spec.name: torch.full(tuple(spec.shape), VALUE, dtype=torch.bfloat16, device=self._device)
            for spec in self.layout.specs
        }
        # The search for NaN is a trifle for a GPU. A CPU takes as long as for the copy, and copies are measured here.
        self._tensors = (states, {ROW: states.pop(ROW)}) if self._device.type == "cpu" else ({}, states)
        for slot in range(NUM_SLOTS):
            self._writer.begin(self, slot, *self._tensors).finish()
        self.plain = PlainCopies(self._device, self.layout.size_bytes, to_device=False)
        with Listener(str(args.socket), "AF_UNIX") as listener:
            reply({"listening": True})
            self.other = listener.accept()
        for slot in range(NUM_SLOTS):
            location = self.arena.location(slot)
            assert location is not None, "the ring lies in shared memory"
            self.other.send_bytes(location.SerializeToString())

    def ring(self, seconds: float) -> dict[str, Any]:
        """Fill what is free and say so, for so long, and for some rounds of the slots."""
        free, writes, packs = deque(range(NUM_SLOTS)), deque[SlotWrite](), 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or packs < LEAST_PACKS:
            if free:
                writes.append(self._writer.begin(self, free.popleft(), *self._tensors))
            # On a GPU one write is under way while the next is launched.
            while len(writes) > (1 if free and self._device.type == "cuda" else 0):
                self._publish(writes.popleft())
                packs += 1
            while not free or self.other.poll():
                free.append(*_FREE.unpack(self.other.recv_bytes()))
        for write in writes:
            self._publish(write)
        self.other.send_bytes(_FULL.pack(*_END))
        free.extend(_FREE.unpack(self.other.recv_bytes())[0] for _ in range(NUM_SLOTS - len(free)))
        return {"packs": packs}

    def _publish(self, write: SlotWrite) -> None:
        assert write.finish(), "hidden states are not finite"
        slot = write.slot_index
        self.other.send_bytes(_FULL.pack(slot, self.arena.generation(slot)))

    def close(self) -> None:
        self.other.close()
        unlock_pages(self.arena.slots())
        self.arena.close()


class Reader:
    """The trainer's end."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._device = torch.device(args.device)
        self._layout = layout_of(args.pack_mib)
        self.other = Client(str(args.socket), "AF_UNIX")
        self._locations = []
        for _ in range(NUM_SLOTS):
            location = batch_pb2.SharedMemoryLocation()
            location.ParseFromString(self.other.recv_bytes())
            self._locations.append(location)
        directory = shared_memory_directory()
        assert directory is not None, "the writer has found one"
        on_gpu = self._device.type == "cuda"
        self._reader = SharedMemoryReader(create_host_id(directory), pin_memory=on_gpu)
        self._names = [spec.name for spec in self._layout.specs]
        self._copy = DeviceCopy(self._device)
        self.plain = PlainCopies(self._device, self._layout.size_bytes, to_device=True)
        first, again = (self._read(0, self._locations[0].slot_generation) for _ in range(2))
        # Where packs are read in place, both are the same memory.
        self.page_locked = first[self._names[0]].data_ptr() == again[self._names[0]].data_ptr()

    def ring(self, seconds: float) -> dict[str, Any]:
        """Take what is full and say so, until the writer ends; bytes per second after the first round of slots."""
        del seconds
        packs, began, taken = 0, 0.0, {}
        while (full := _FULL.unpack(self.other.recv_bytes())) != _END:
            taken = self._copy.to_device(self._read(*full))
            self.other.send_bytes(_FREE.pack(full[0]))
            packs += 1
            ended = time.perf_counter()
            if packs == NUM_SLOTS:
                began = ended
        assert all(bool((tensor == VALUE).all()) for tensor in taken.values()), (
            "a pack did not arrive as it was written"
        )
        return {"bytes_per_second": (packs - NUM_SLOTS) * self._layout.size_bytes / (ended - began), "packs": packs}

    def _read(self, slot: int, generation: int) -> dict[str, torch.Tensor]:
        """The pack of a slot; for a GPU in the slot itself."""
        self._locations[slot].slot_generation = generation
        manifest = batch_pb2.PackManifest(tensors=self._layout.specs, payload_size_bytes=self._layout.size_bytes)
        location = batch_pb2.PayloadLocation(shared_memory=self._locations[slot])
        return self._reader.read(PayloadRef(b"", manifest, (location,), time_to_live=60.0), self._names)

    def close(self) -> None:
        self.other.close()
        self._reader.close()


class PlainCopies:
    """Copies of whole packs between the device and page-locked memory of this process, on the CPU in memory."""

    def __init__(self, device: torch.device, pack_bytes: int, *, to_device: bool) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._events: deque[torch.cuda.Event] = deque()
        there = torch.zeros(pack_bytes, dtype=torch.uint8, device=device)
        here = [torch.zeros(pack_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(PLAIN_PACKS)]
        self._copies = [(there, each) if to_device else (each, there) for each in here]

    def rate(self, seconds: float) -> dict[str, Any]:
        """Bytes per second for so long."""
        moved, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            for target, source in self._copies:
                self._run(target, source)
                self._wait(leave=IN_FLIGHT)
                moved += len(source)
        self._wait(leave=0)
        return {"bytes_per_second": moved / (time.perf_counter() - began)}

    def _run(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            np.copyto(target.numpy(), source.numpy())
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._events.append(event)

    def _wait(self, *, leave: int) -> None:
        while len(self._events) > leave:
            self._events.popleft().synchronize()


def meet(other: Connection) -> None:
    """Both ends begin at the same time."""
    other.send_bytes(b"go")
    other.recv_bytes()


if __name__ == "__main__":
    sys.exit(main())
