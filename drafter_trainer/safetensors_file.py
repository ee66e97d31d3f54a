"""Writes .safetensors files tensor by tensor, with a checksum on the way and plain OSErrors when the disk is full.

The format is small: the length of the header (8 bytes, little-endian), a JSON header, the bytes of the tensors. The
library's own writer needs every tensor in CPU memory at once and reports a full disk as a string.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import google_crc32c
import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.uint8: "U8"}
_BLOCK_BYTES = 1 << 24


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[int, int]:
    """Write `tensors` (any device) to `path`, flushed to the disk; returns (bytes, crc32c).

    `metadata` goes into the header; transformers wants `{"format": "pt"}`.

    Raises:
        OSError: the file system refused.
    """
    header = _header(tensors, metadata)
    checksum = google_crc32c.Checksum()
    size = 0
    with path.open("wb") as file:
        for block in (len(header).to_bytes(8, "little"), header):
            checksum.update(block)
            size += file.write(block)
        for tensor in tensors.values():
            payload = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
            for start in range(0, len(payload), _BLOCK_BYTES):
                block = payload[start : start + _BLOCK_BYTES].tobytes()
                checksum.update(block)
                size += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return size, int.from_bytes(checksum.digest(), "big")


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
