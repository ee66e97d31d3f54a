"""What every transport does: copy chosen tensors of one payload into memory of the reader's own."""

import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import batch_pb2, tensor_pb2
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.reasons import Reason
from slipstream.wire.codec import ALIGNMENT_BYTES, ByteArray, check_spec, checksum, view_bytes


@dataclass(frozen=True, slots=True)
class PayloadRef:
    """A payload that may be read: a leased pack, or one of the server's fixed payloads."""

    token: bytes
    manifest: batch_pb2.PackManifest
    locations: tuple[batch_pb2.PayloadLocation, ...]
    time_to_live: float | None = None
    """Seconds for which the lease was granted; None when the token never expires."""

    @classmethod
    def of_lease(cls, lease: batch_pb2.Lease) -> "PayloadRef":
        """The pack of a lease."""
        time_to_live = lease.time_to_live.ToTimedelta().total_seconds()
        return cls(lease.lease_token, lease.manifest, tuple(lease.locations), time_to_live)

    @classmethod
    def of_fixed(cls, payload: pb.FixedPayload) -> "PayloadRef":
        """The frozen weights or the probe."""
        return cls(payload.token, payload.manifest, tuple(payload.locations))

    @property
    def shared_memory(self) -> batch_pb2.SharedMemoryLocation | None:
        """Where the payload lies in shared memory; None when the server does not offer it."""
        for location in self.locations:
            if location.WhichOneof("location") == "shared_memory":
                return location.shared_memory
        return None

    @property
    def slot_generation(self) -> int:
        """For ConfirmRead: the generation of the slot; 0 without shared memory, where the server knows it."""
        location = self.shared_memory
        return location.slot_generation if location is not None else 0


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Neighbouring tensors of a payload, read in one go."""

    offset_bytes: int
    size_bytes: int
    specs: tuple[tensor_pb2.TensorSpec, ...]


class PayloadReader(ABC):
    """Copies tensors out of payloads. One thread at a time uses a reader.

    After `read`, and before the use of what it returned, the caller asks ConfirmRead.
    """

    name: str
    """As in a recipe's `stream.transport`."""
    transport: pb.Transport
    """As in LeasePacksRequest: the server computes checksums of hidden states only where a transport needs them."""
    verifies_fixed_payloads: bool
    """Whether payloads that always have checksums are compared with them: where bytes can be damaged on the way."""

    def __init__(self, *, pin_memory: bool = False) -> None:
        """`pin_memory`: return page-locked tensors, which a GPU copies asynchronously."""
        self._pin_memory = pin_memory
        self._pool = BufferPool()
        self.gigabytes_per_second: float | None = None
        """Measured by `choose_reader` with the server's probe; None before."""

    def read(self, ref: PayloadRef, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Copy the named tensors into CPU memory that belongs to the result; every tensor is contiguous.

        Raises:
            SlipstreamError: LEASE_LOST when the payload is gone or changed during the copy, PAYLOAD_CORRUPT when the
                bytes or the manifest are wrong, TARGET_INCOMPATIBLE when the payload lacks a tensor,
                TRANSPORT_UNAVAILABLE when the payload cannot be read this way.
        """
        tensors: dict[str, torch.Tensor] = {}
        for run in contiguous_runs(ref.manifest, names):
            raw = self._allocate(run.size_bytes, recycled=ref.time_to_live is not None)
            self._fill(ref, run, raw.numpy())
            if ref.time_to_live is not None or self.verifies_fixed_payloads:
                self._verify(ref, run, raw.numpy())
            tensors.update((spec.name, view_bytes(raw, spec, run.offset_bytes)) for spec in run.specs)
        return {name: tensors[name] for name in names}

    def _verify(self, ref: PayloadRef, run: ByteRun, buffer: ByteArray) -> None:
        """Compare what was read of `run` with the manifest's checksums; a tensor that differs is read again, once.

        Raises:
            SlipstreamError: PAYLOAD_CORRUPT when it differs again; LEASE_LOST.
        """
        for spec in run.specs:
            part = bytes_of(run, spec, buffer)
            if is_damaged(spec, part):
                self._fill(ref, ByteRun(spec.offset_bytes, spec.size_bytes, ()), part)
                if is_damaged(spec, part):
                    raise damaged_twice(spec, part)

    @abstractmethod
    def _fill(self, ref: PayloadRef, run: ByteRun, buffer: ByteArray) -> None:
        """Copy the bytes of `run` into `buffer`, uint8 `[run.size_bytes]`, from the slot that was leased."""

    @abstractmethod
    def close(self) -> None:
        """Give mappings and streams back; idempotent."""

    def _allocate(self, size_bytes: int, *, recycled: bool) -> torch.Tensor:
        """Bytes to read into, uint8 `[size_bytes]`. Packs are all of one size and recycle theirs."""
        if self._pin_memory:  # torch recycles pinned memory by itself, once the GPU has read it
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        if recycled:
            return torch.from_numpy(self._pool.take(size_bytes))
        return torch.empty(size_bytes, dtype=torch.uint8)


class BufferPool:
    """Memory that comes back when the last tensor on it is gone.

    The first touch of fresh pages takes several times as long as the copy itself; only the first packs pay for it.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, size_bytes: int) -> ByteArray:
        """Uninitialised uint8 `[size_bytes]`; its memory is free again when the array is collected."""
        free = self._free.setdefault(size_bytes, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = mmap.mmap(-1, max(size_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(memory, np.uint8, size_bytes)
        weakref.finalize(array, free.append, memory).atexit = False
        return array


def contiguous_runs(manifest: batch_pb2.PackManifest, names: Sequence[str]) -> list[ByteRun]:
    """The named tensors in payload order, joined where only alignment padding lies between them.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE for a name the payload lacks, PAYLOAD_CORRUPT for a misshapen manifest.
    """
    by_name = {spec.name: spec for spec in manifest.tensors}
    missing = sorted(set(names) - by_name.keys())
    if missing:
        raise SlipstreamError(
            f"The payload has no tensor {', '.join(missing)}; it has {', '.join(by_name)}.",
            reason=Reason.TARGET_INCOMPATIBLE,
            remedy="Open the subscription with the layers that the drafter reads.",
        )
    runs: list[ByteRun] = []
    for spec in sorted((by_name[name] for name in set(names)), key=lambda spec: spec.offset_bytes):
        check_spec(spec)
        end = spec.offset_bytes + spec.size_bytes
        if end > manifest.payload_size_bytes:
            raise SlipstreamError(
                f"Tensor {spec.name!r} ends at byte {end} of a payload of {manifest.payload_size_bytes} bytes.",
                reason=Reason.PAYLOAD_CORRUPT,
            )
        last = runs[-1] if runs else None
        if last and 0 <= spec.offset_bytes - (last.offset_bytes + last.size_bytes) < ALIGNMENT_BYTES:
            runs[-1] = ByteRun(last.offset_bytes, end - last.offset_bytes, (*last.specs, spec))
        else:
            runs.append(ByteRun(spec.offset_bytes, spec.size_bytes, (spec,)))
    return runs


def is_damaged(spec: tensor_pb2.TensorSpec, part: ByteArray) -> bool:
    """Whether bytes are not those that the manifest has a checksum of."""
    return bool(spec.crc32c) and checksum(part) != spec.crc32c


def damaged_twice(spec: tensor_pb2.TensorSpec, part: ByteArray) -> SlipstreamError:
    """The error for a tensor that was read twice."""
    return SlipstreamError(
        f"Tensor {spec.name!r} was read with crc32c {checksum(part):#010x}, twice; expected {spec.crc32c:#010x}.",
        reason=Reason.PAYLOAD_CORRUPT,
        remedy="Release the lease: the pack is computed again. If it recurs, suspect memory or network.",
    )


def bytes_of(run: ByteRun, spec: tensor_pb2.TensorSpec, buffer: ByteArray) -> ByteArray:
    """The part of a run's buffer that holds one of its tensors."""
    start = spec.offset_bytes - run.offset_bytes
    part: np.ndarray[tuple[int], np.dtype[np.uint8]] = buffer[start : start + spec.size_bytes]
    return part
