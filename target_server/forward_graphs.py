"""Forwards of a small target as recorded CUDA graphs: the host launches one thing a pack instead of hundreds.

A recording holds its kernels with their arguments, so what changes from pack to pack lies in fixed memory: tokens,
positions, and where documents end. Their number and the longest are rounded up; documents that are not there are empty.
A combination is recorded when it first comes, in a fraction of a second; once there are many, a larger one serves.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.telemetry.logs import log_event
from target_server.attention import Kernel, PackedDocuments, to_device

RunDocuments = Callable[[PackedDocuments, Tensor, Tensor, Sequence[int]], dict[int, Tensor]]
"""(documents, token ids [T], positions [T], layers) -> outputs [T, D] by layer."""

_Key = tuple[int, int, tuple[int, ...]]
"""Most documents, most tokens of one, captured layers."""

LAUNCH_BOUND = 0.5
"""A forward whose launch takes more than this share of its time is recorded."""
# What is rounded up to these costs the GPU blocks that find nothing to do.
_DOCUMENTS_STEP, _FEWEST_DOCUMENTS = 8, 16
_LONGEST_STEP, _SHORTEST_LONGEST = 256, 512
_MOST_RECORDINGS = 16
_ROUNDING = 0.01

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    cumulative_lengths: Tensor


class ForwardGraphs:
    """Recorded forwards of packs of one length, on one device. For the engine thread."""

    def __init__(self, rows: int, device: torch.device, kernel: Kernel, run: RunDocuments) -> None:
        """`run` must launch the same kernels every time, whatever the tokens are."""
        self._rows, self._device, self._kernel, self._run = rows, device, kernel, run
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._recordings: dict[_Key, _Recording] = {}
        self._outputs: dict[int, Tensor] = {}
        """By layer; every recording leaves its own here, so that their memory is the same."""
        # One stream for all: memory of one stream is not reused by another, and a recording holds what it needed.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._refused = False

    def run(
        self, tokens: Tensor, positions: Tensor, lengths: Sequence[int], layer_ids: Sequence[int]
    ) -> dict[int, Tensor] | None:
        """Outputs `[T, D]` by layer, new tensors; None where this pack is not recorded and cannot be.

        Args:
            tokens: int64 `[T]`, in host memory.
            positions: int64 `[T]`, in host memory.
            lengths: of all documents, which fill the pack.
            layer_ids: captured layers.
        """
        key = self._key(lengths, tuple(layer_ids))
        if key is None:
            return None
        self._tokens.copy_(tokens.pin_memory(), non_blocking=True)
        self._positions.copy_(positions.pin_memory(), non_blocking=True)
        cumulative = cumulative_lengths(lengths, key[0])
        if key not in self._recordings:
            return self._first(key, lengths, cumulative)
        return self._replay(self._recordings[key], cumulative, key[2])

    def _key(self, lengths: Sequence[int], layer_ids: tuple[int, ...]) -> _Key | None:
        """The recording for such documents, there or to be made; None when it is not there and cannot be."""
        count = max(round_up(len(lengths), _DOCUMENTS_STEP), _FEWEST_DOCUMENTS)
        longest = max(round_up(max(lengths), _LONGEST_STEP), _SHORTEST_LONGEST)
        key = (count, longest, layer_ids)
        if key in self._recordings or (not self._refused and len(self._recordings) < _MOST_RECORDINGS):
            return key
        larger = [k for k in self._recordings if k[0] >= count and k[1] >= longest and k[2] == layer_ids]
        return min(larger, default=None)

    def _first(self, key: _Key, lengths: Sequence[int], cumulative: Tensor) -> dict[int, Tensor] | None:
        """Record, and compare the first pack with a forward that is not recorded."""
        try:
            recording = self._record(key, cumulative)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._refuse(str(error).partition("\n")[0])
            return None
        documents = PackedDocuments(lengths, self._device, self._kernel)
        direct = self._run(documents, self._tokens, self._positions, key[2])
        outputs = self._replay(recording, cumulative, key[2])
        if not all(_equal(outputs[layer], direct[layer]) for layer in key[2]):
            self._refuse("it computes something else")
            return None
        self._recordings[key] = recording
        log_event(_log, "info", "forward_recorded", rows=self._rows, documents=key[0], longest=key[1])
        return outputs

    def _refuse(self, why: str) -> None:
        """From now on packs are launched kernel by kernel."""
        self._refused = True
        self._recordings.clear()
        log_event(_log, "warning", "forward_not_recorded", why=why, effect="the host launches every kernel of a pack")

    def _replay(self, recording: _Recording, cumulative: Tensor, layer_ids: Sequence[int]) -> dict[int, Tensor]:
        recording.cumulative_lengths.copy_(cumulative.pin_memory(), non_blocking=True)
        recording.graph.replay()
        # The next pack writes where these are.
        return {layer: self._outputs[layer].clone() for layer in layer_ids}

    def _record(self, key: _Key, cumulative: Tensor) -> _Recording:
        _, longest, layer_ids = key
        assert self._stream is not None, "forwards are recorded on CUDA"
        documents = PackedDocuments((self._rows,), self._device, self._kernel)
        documents.cumulative_lengths = to_device(cumulative, self._device)
        documents.max_length = min(longest, self._rows)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            outputs = self._run(documents, self._tokens, self._positions, layer_ids)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for layer in layer_ids:
            if layer not in self._outputs:
                self._outputs[layer] = torch.empty_like(outputs[layer])
        del outputs
        graph = torch.cuda.CUDAGraph()
        # Other threads go on to use CUDA: a new stream's memory may be locked meanwhile.
        recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with self._left_clean(), recording:
            for layer, output in self._run(documents, self._tokens, self._positions, layer_ids).items():
                self._outputs[layer].copy_(output)
        return _Recording(graph, documents.cumulative_lengths)

    @contextmanager
    def _left_clean(self) -> Iterator[None]:
        """Where a recording is cut short, torch stays on its stream, and its allocator keeps all memory that a copy on
        another stream has read until the recording ends, which it never does: every pack would be a leak."""
        computing = torch.cuda.current_stream(self._device)
        try:
            yield
        except RuntimeError:
            torch.cuda.set_stream(computing)
            internals: Any = torch._C
            with suppress(RuntimeError):  # it was ended after all
                internals._cuda_endAllocateToPool(computing.device_index, self._pool)
                internals._cuda_releasePool(computing.device_index, self._pool)
            raise


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    """But for rounding."""
    difference = (ours.float() - theirs.float()).abs().mean()
    return bool(difference <= _ROUNDING * theirs.float().abs().mean())


def round_up(value: int, step: int) -> int:
    """To a multiple of `step`."""
    return -(-value // step) * step


def cumulative_lengths(lengths: Sequence[int], count: int) -> Tensor:
    """Where documents begin and end, int32 `[count + 1]`; documents that are not there are empty, at the end."""
    ends = torch.zeros(count + 1, dtype=torch.int32)
    ends[1 : len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    ends[len(lengths) + 1 :] = ends[len(lengths)].item()
    return ends
