"""How tensors become one block of bytes and back: a layout, a write, a view.

A payload is little-endian and row-major; every tensor starts at a multiple of 64 bytes and has no padding inside.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import google_crc32c
import numpy as np
import torch

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import tensor_pb2 as pb
from slipstream.run_spec.reasons import Reason

assert sys.byteorder == "little", "payloads are little-endian; this machine is not"

ALIGNMENT_BYTES = 64
"""Every tensor starts at a multiple of this: a cache line, and enough for any vector load."""

ByteArray = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""One-dimensional numpy uint8: the form in which bytes are handed around."""

DTYPES: Mapping[pb.DataType, torch.dtype] = MappingProxyType(
    {
        pb.DATA_TYPE_BFLOAT16: torch.bfloat16,
        pb.DATA_TYPE_FLOAT16: torch.float16,
        pb.DATA_TYPE_FLOAT32: torch.float32,
        pb.DATA_TYPE_FLOAT8_E4M3FN: torch.float8_e4m3fn,
        pb.DATA_TYPE_INT32: torch.int32,
        pb.DATA_TYPE_INT64: torch.int64,
        pb.DATA_TYPE_UINT8: torch.uint8,
    }
)
"""Every element type that can travel."""

_DATA_TYPES: Mapping[torch.dtype, pb.DataType] = MappingProxyType({dtype: number for number, dtype in DTYPES.items()})

LayoutEntry = tuple[str, torch.dtype, Sequence[int]]
"""Name, element type and shape of a tensor to be laid out."""


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """Where each tensor of a payload lies."""

    specs: tuple[pb.TensorSpec, ...]
    size_bytes: int
    """Bytes of the whole payload, a multiple of 64."""


def plan_layout(entries: Sequence[LayoutEntry]) -> PayloadLayout:
    """Lay tensors out one after the other in the order given.

    Args:
        entries: (name, element type, shape) of every tensor; names are unique.
    """
    specs: list[pb.TensorSpec] = []
    offset = 0
    names: set[str] = set()
    for name, dtype, shape in entries:
        assert name not in names, f"tensor {name!r} is laid out twice"
        assert dtype in _DATA_TYPES, (
            f"tensor {name!r}: {dtype} cannot travel; possible: {sorted(map(str, _DATA_TYPES))}"
        )
        names.add(name)
        size = math.prod(shape) * dtype.itemsize
        specs.append(
            pb.TensorSpec(name=name, data_type=_DATA_TYPES[dtype], shape=shape, offset_bytes=offset, size_bytes=size)
        )
        offset = align(offset + size)
    return PayloadLayout(tuple(specs), offset)


def align(size_bytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Round up to a multiple of `alignment` bytes."""
    return -(-size_bytes // alignment) * alignment


def write_tensor(buffer: ByteArray, spec: pb.TensorSpec, tensor: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy a tensor, from any device and with any strides, to its place in the payload.

    Args:
        buffer: the payload, uint8 `[size_bytes]`, writable.
        spec: from `plan_layout`; shape and element type equal the tensor's.
        tensor: what to write.
        non_blocking: from a GPU into page-locked memory, leave the copy to the current CUDA stream.
    """
    assert tuple(tensor.shape) == tuple(spec.shape), f"{spec.name}: {tuple(tensor.shape)} for {tuple(spec.shape)}"
    assert tensor.dtype == DTYPES[spec.data_type], f"{spec.name}: {tensor.dtype} for {DTYPES[spec.data_type]}"
    view_tensor(buffer, spec).copy_(tensor, non_blocking=non_blocking)


def view_tensor(buffer: ByteArray, spec: pb.TensorSpec, base_offset: int = 0) -> torch.Tensor:
    """The tensor inside the payload, without a copy: it shares memory with `buffer` and keeps it alive.

    Args:
        buffer: uint8, writable; holds the payload from byte `base_offset` of the payload on.
        spec: the tensor's entry in the manifest.
        base_offset: position in the payload of the first byte of `buffer`; a multiple of 64.

    Raises:
        SlipstreamError: PAYLOAD_CORRUPT when the entry contradicts itself or reaches beyond the buffer.
    """
    return view_bytes(torch.from_numpy(buffer), spec, base_offset)


def view_bytes(raw: torch.Tensor, spec: pb.TensorSpec, base_offset: int = 0) -> torch.Tensor:
    """`view_tensor` in the bytes of a tensor (uint8 `[n]`): the result keeps its storage, and so its pinning.

    Raises:
        SlipstreamError: PAYLOAD_CORRUPT, as `view_tensor`.
    """
    check_spec(spec)
    start = spec.offset_bytes - base_offset
    if start < 0 or start + spec.size_bytes > raw.numel():
        raise _corrupt(
            f"tensor {spec.name!r} lies at bytes {spec.offset_bytes}..{spec.offset_bytes + spec.size_bytes}, "
            f"but the bytes at hand are {base_offset}..{base_offset + raw.numel()} of the payload."
        )
    return raw[start : start + spec.size_bytes].view(DTYPES[spec.data_type]).view(tuple(spec.shape))


def check_spec(spec: pb.TensorSpec) -> None:
    """Refuse an entry that contradicts itself: manifests come from another process.

    Raises:
        SlipstreamError: PAYLOAD_CORRUPT for an unknown element type, a negative axis, a size that is not that of
            shape and type, or an offset that is negative or not a multiple of 64.
    """
    dtype = DTYPES.get(spec.data_type)
    if dtype is None:
        raise _corrupt(f"tensor {spec.name!r} has element type {spec.data_type}, which this version does not know.")
    shape = tuple(spec.shape)
    expected = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or spec.size_bytes != expected:
        raise _corrupt(f"tensor {spec.name!r} of {dtype} {list(shape)} has {spec.size_bytes} bytes, not {expected}.")
    if spec.offset_bytes < 0 or spec.offset_bytes % ALIGNMENT_BYTES:
        raise _corrupt(f"tensor {spec.name!r} starts at byte {spec.offset_bytes}, not a multiple of {ALIGNMENT_BYTES}.")


def checksum(buffer: ByteArray) -> int:
    """crc32c (Castagnoli) of contiguous bytes, without copying them."""
    return int(google_crc32c.value(buffer))


def _corrupt(message: str) -> SlipstreamError:
    return SlipstreamError(
        f"Misshapen payload: {message}",
        reason=Reason.PAYLOAD_CORRUPT,
        remedy="Target server and trainer must be of the same version of Slipstream.",
    )
