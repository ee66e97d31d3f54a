"""Copies from host memory to the trainer's device, beside the step that runs there."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST_GAP = 4096
"""Bytes between two tensors of one memory that are copied along, rather than begin another copy."""


class DeviceCopy:
    """On CUDA: from page-locked memory, on a stream of its own. On the CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy; the copies are complete on return, so that the source may be reused. For the feeder thread."""
        if self._stream is None:
            return dict(tensors)
        with torch.cuda.stream(self._stream):
            moved = copied_in_runs(tensors, self._device)
        self._stream.synchronize()
        return moved

    def hand_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Tell the allocator that the current stream uses the tensors from now on. For the training thread."""
        if self._stream is not None:
            stream = torch.cuda.current_stream(self._device)
            for tensor in tensors.values():
                tensor.record_stream(stream)


def copied_in_runs(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on `device`, those that lie side by side in one memory by one copy: a payload is one of a few copies,
    not of a dozen. Where another process computes on the GPU, each copy waits for its turn. The copies do not block.
    """
    moved = {}
    for run in _runs(tensors):
        there = run.bytes_of_all().to(device, non_blocking=True)
        for name in run.names:
            tensor = tensors[name]
            begin = _begin(tensor) - run.begin
            moved[name] = there[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return {name: moved[name] for name in tensors}


@dataclass
class _Run:
    """Tensors of one memory, side by side."""

    storage: torch.UntypedStorage
    begin: int
    end: int
    names: list[str]

    def bytes_of_all(self) -> Tensor:
        """Uint8 `[end - begin]`, no copy."""
        raw = torch.empty(0, dtype=torch.uint8)
        return raw.set_(self.storage, self.begin, (self.end - self.begin,))  # type: ignore[call-overload]


def _runs(tensors: Mapping[str, Tensor]) -> Iterator[_Run]:
    run: _Run | None = None
    placed = sorted(tensors, key=lambda name: (tensors[name].untyped_storage().data_ptr(), _begin(tensors[name])))
    for name in placed:
        tensor = tensors[name]
        assert tensor.is_contiguous(), f"{name} is not contiguous"
        storage, begin, end = tensor.untyped_storage(), _begin(tensor), _begin(tensor) + tensor.nbytes
        if run is not None and _goes_on(run, storage, begin, tensor.itemsize):
            run.end = max(run.end, end)
            run.names.append(name)
            continue
        if run is not None:
            yield run
        run = _Run(storage, begin, end, [name])
    if run is not None:
        yield run


def _goes_on(run: _Run, storage: torch.UntypedStorage, begin: int, itemsize: int) -> bool:
    """Whether a tensor that begins there belongs to the run; its bytes must be aligned on the other side, too."""
    same = storage.data_ptr() == run.storage.data_ptr()
    return same and begin - run.end <= _LARGEST_GAP and (begin - run.begin) % itemsize == 0


def _begin(tensor: Tensor) -> int:
    """The byte of its storage at which a tensor begins."""
    return int(tensor.storage_offset()) * tensor.itemsize
