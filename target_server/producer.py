"""④→⑤ The engine: the one thread that runs a target. It waits for demand, computes a pack, puts it on the shelf.

A thread of the server, or the main thread of an engine process (engine_process.py), whose packs the server publishes.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.telemetry.phase_times import PhaseTimes
from target_server.packing import Pack
from target_server.shelf import PackFacts
from target_server.slot_writer import SlotMemory, SlotWrite, SlotWriter
from target_server.state_cache_part import part_of
from target_server.target_model import TargetModel
from target_server.work_queue import Work

_LOOK_AGAIN_SECONDS = 0.001
"""How often an engine that waits for demand looks whether the device has finished a pack."""

_log = logging.getLogger(__name__)


class Throughput:
    """Pack tokens per second, padding included, over the last half minute. Thread-safe."""

    _WINDOW_SECONDS = 30.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packs: deque[tuple[float, str, int]] = deque()
        """When a pack was finished, of which stream, and its tokens."""

    def note(self, stream: str, tokens: int) -> None:
        """A pack was finished."""
        with self._lock:
            self._packs.append((time.monotonic(), stream, tokens))
            self._forget_old()

    def tokens_per_second(self, stream: str) -> float:
        """0.0 while fewer than two packs of the stream are in the window."""
        with self._lock:
            self._forget_old()
            packs = [(finished, tokens) for finished, name, tokens in self._packs if name == stream]
        if len(packs) < 2:
            return 0.0
        # The first pack marks the beginning; its tokens came before it.
        return sum(tokens for _, tokens in packs[1:]) / (time.monotonic() - packs[0][0])

    def _forget_old(self) -> None:
        oldest = time.monotonic() - self._WINDOW_SECONDS
        while self._packs and self._packs[0][0] < oldest:
            self._packs.popleft()


class Assignments(Protocol):
    """Which pack is computed next, and what becomes of it: the WorkQueue, or the line to it in an engine's process."""

    def next_work(self, max_wait: float = ...) -> Work | None:
        """As WorkQueue."""

    def publish(self, work: Work, facts: PackFacts) -> None:
        """As WorkQueue."""

    def quarantine(self, work: Work, document_names: tuple[str, ...], why: str = ...) -> None:
        """As WorkQueue."""

    def abandon(self, work: Work) -> None:
        """As WorkQueue."""


class PackSource(Protocol):
    """The packs of a stream by number."""

    def pack(self, sequence_number: int) -> Pack:
        """As PackSequence."""


class ComputedStream(SlotMemory, Protocol):
    """What must be known of a stream to compute its packs."""

    @property
    def name(self) -> str: ...
    @property
    def layer_ids(self) -> tuple[int, ...]: ...
    @property
    def last_hidden_state(self) -> bool: ...
    @property
    def pack_tokens(self) -> int: ...
    @property
    def sequence(self) -> PackSource: ...


class OpenStreams(Protocol):
    """The streams whose packs are asked for: the StreamCatalog, or what an engine's process was told of it."""

    def get(self, name: str) -> ComputedStream:
        """A stream that is on a shelf."""


@dataclass(frozen=True)
class _Launched:
    """A pack that the device may still be computing."""

    work: Work
    pack: Pack
    stream: ComputedStream
    write: SlotWrite


class Producer:
    """Turns work into packs. `run` belongs to the thread that loaded the target."""

    def __init__(
        self, target: TargetModel, queue: Assignments, catalog: OpenStreams, writer: SlotWriter | None = None
    ) -> None:
        """`writer`: default: one for the target's device."""
        self._target = target
        self._queue = queue
        self._catalog = catalog
        self._writer = SlotWriter(target.device) if writer is None else writer
        # While a GPU computes and copies one pack, the host launches the next.
        self._packs_in_flight = 1 if target.device.type == "cuda" else 0
        self._launched: deque[_Launched] = deque()
        self.throughput = Throughput()
        self.times = PhaseTimes()

    def run(self) -> None:
        """Compute packs until the queue is closed.

        Raises:
            SlipstreamError: OUT_OF_MEMORY on the target's device. What else the model raises is not caught: after it,
                a device is in no state to go on.
        """
        try:
            while True:
                with self.times.measured("demand"):
                    work = self._next_work()
                if work is not None:
                    self._launch(work)
                    self._settle(leave=self._packs_in_flight)
                elif self._launched:
                    self._settle()
                else:
                    return
        finally:
            self._abandon_launched()
            self.times.log(_log, "engine_times")

    def _next_work(self) -> Work | None:
        """Wait for demand, but not longer than for the pack that the device is at.

        A trainer that was given a pack asks for the next one a moment after that pack was published: an engine that had
        looked before, and then waited for the device, would leave it idle between any two packs.
        """
        if not self._launched:
            return self._queue.next_work(float("inf"))
        while True:
            began = time.monotonic()
            is_done = self._launched[0].write.is_done
            work = self._queue.next_work(0.0 if is_done else _LOOK_AGAIN_SECONDS)
            if work is not None or is_done:
                return work
            # A queue that was closed does not wait.
            time.sleep(max(0.0, _LOOK_AGAIN_SECONDS - (time.monotonic() - began)))

    def compute(self, work: Work) -> None:
        """Compute one pack and put it on the shelf, or set it aside for ever.

        Raises:
            As `run`; the slot is empty then.
        """
        try:
            self._launch(work)
            self._settle()
        finally:
            self._abandon_launched()

    def _launch(self, work: Work) -> None:
        """Begin a pack."""
        try:
            stream = self._catalog.get(work.stream)
            if not self._target.is_prepared(stream.pack_tokens):
                self._settle()  # what is ready must not wait for a compiler
                self._target.prepare(stream.pack_tokens)
            with self.times.measured("launch"):
                pack = stream.sequence.pack(work.sequence_number)
                part = part_of(pack, work.documents if self._target.computes_any_length else None)
                states = self._target.capture(
                    part.token_ids, part.document_lengths, stream.layer_ids, stream.last_hidden_state
                )
                write = self._writer.begin(stream, work.slot.index, tensors_of(pack), states, part.rows)
        except BaseException:
            self._queue.abandon(work)
            raise
        self._launched.append(_Launched(work, pack, stream, write))

    def _settle(self, leave: int = 0) -> None:
        """Publish launched packs, oldest first, until `leave` are left."""
        while len(self._launched) > leave:
            launched = self._launched[0]
            with self.times.measured("finish"):
                finite = launched.write.finish()
            self._launched.popleft()
            self._conclude(launched, finite)

    def _conclude(self, launched: _Launched, finite: bool) -> None:
        work, pack, stream = launched.work, launched.pack, launched.stream
        if not finite:
            self._queue.quarantine(work, pack.document_names)
            return
        generation = stream.arena.generation(work.slot.index)
        self._queue.publish(work, PackFacts(pack.num_tokens, pack.num_supervised, generation))
        self.throughput.note(stream.name, stream.pack_tokens)
        self.times.count()

    def _abandon_launched(self) -> None:
        """After a failure: what was under way is nobody's."""
        while self._launched:
            self._queue.abandon(self._launched.popleft().work)


def tensors_of(pack: Pack) -> dict[str, torch.Tensor]:
    """The tensors `[T]` of a payload that do not come from the model."""
    return {
        "input_ids": torch.from_numpy(pack.token_ids),
        "loss_mask": torch.from_numpy(pack.loss_mask),
        "document_ids": torch.from_numpy(pack.document_ids),
        "position_ids": torch.from_numpy(pack.position_ids),
    }
