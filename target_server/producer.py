"""④→⑤ The engine: the one thread that runs the target. It waits for demand, computes a pack, puts it on the shelf."""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping

import torch

from slipstream.telemetry.logs import log_event
from slipstream.wire.codec import ByteArray, write_tensor
from target_server.packing import Pack
from target_server.shelf import PackFacts
from target_server.streams import Stream, StreamCatalog
from target_server.target_model import TargetModel
from target_server.work_queue import Work, WorkQueue

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


class Producer:
    """Turns work into packs. `run` belongs to the thread that loaded the target."""

    def __init__(self, target: TargetModel, queue: WorkQueue, catalog: StreamCatalog) -> None:
        self._target = target
        self._queue = queue
        self._catalog = catalog
        self.throughput = Throughput()

    def run(self) -> None:
        """Compute packs until the queue is closed.

        Raises:
            SlipstreamError: OUT_OF_MEMORY on the target's device. What else the model raises is not caught: after it,
                a device is in no state to go on.
        """
        while (work := self._queue.next_work()) is not None:
            self.compute(work)

    def compute(self, work: Work) -> None:
        """Compute one pack and put it on the shelf, or set it aside for ever.

        Raises:
            As `run`; the slot is empty then.
        """
        try:
            self._compute(work, self._catalog.get(work.stream))
        except BaseException:
            self._queue.abandon(work)
            raise

    def _compute(self, work: Work, stream: Stream) -> None:
        pack = stream.sequence.pack(work.sequence_number)
        states = self._target.capture(pack.token_ids, pack.document_lengths, stream.layer_ids, stream.last_hidden_state)
        if not all(_is_finite(state) for state in states.values()):
            self._queue.quarantine(work, pack.document_names)
            log_event(
                _log, "warning", "pack_quarantined", stream=stream.name, sequence_number=work.sequence_number,
                why="hidden states are not finite", documents=pack.document_names,
            )  # fmt: skip
            return
        generation = _fill(stream, work.slot.index, _tensors_of(pack) | dict(states))
        self._queue.publish(work, PackFacts(pack.num_tokens, pack.num_supervised, generation))
        self.throughput.note(stream.name, stream.pack_tokens)


def _fill(stream: Stream, slot_index: int, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write a payload into a slot; returns the generation under which it can be read."""
    stream.arena.begin_write(slot_index)
    slot: ByteArray = stream.arena.slot(slot_index)
    for spec in stream.layout.specs:
        write_tensor(slot, spec, tensors[spec.name])
    stream.arena.end_write(slot_index)
    return stream.arena.generation(slot_index)


def _tensors_of(pack: Pack) -> dict[str, torch.Tensor]:
    """The tensors `[T]` of a payload that do not come from the model."""
    return {
        "input_ids": torch.from_numpy(pack.token_ids),
        "loss_mask": torch.from_numpy(pack.loss_mask),
        "document_ids": torch.from_numpy(pack.document_ids),
        "position_ids": torch.from_numpy(pack.position_ids),
    }


def _is_finite(tensor: torch.Tensor) -> bool:
    """Neither NaN nor infinite anywhere, without a temporary of the tensor's size: both extremes propagate NaN."""
    smallest, largest = torch.aminmax(tensor)
    return bool(torch.isfinite(smallest) & torch.isfinite(largest))
