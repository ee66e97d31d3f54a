"""Copies from host memory to the trainer's device, beside the step that runs there."""

from collections.abc import Mapping

import torch
from torch import Tensor


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
            moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}
        self._stream.synchronize()
        return moved

    def hand_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Tell the allocator that the current stream uses the tensors from now on. For the training thread."""
        if self._stream is not None:
            stream = torch.cuda.current_stream(self._device)
            for tensor in tensors.values():
                tensor.record_stream(stream)
