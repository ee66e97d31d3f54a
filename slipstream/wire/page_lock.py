"""Page-locks shared memory for this process's GPU, which then copies from and into it at the speed of the bus."""

import logging
from contextlib import suppress
from typing import Any

import torch

from slipstream.telemetry.logs import log_event
from slipstream.wire.codec import ByteArray

_log = logging.getLogger(__name__)
_locked: set[int] = set()
"""Addresses of what is locked."""


def lock_pages(memory: ByteArray, *, effect: str) -> bool:
    """Register memory with CUDA; false, and said in the log, where that is refused: it costs speed only.

    Args:
        memory: contiguous, writable; given to `unlock_pages` before it is unmapped.
        effect: what a refusal means, for the log.
    """
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    if status == 0:
        _locked.add(memory.ctypes.data)
        return True
    with suppress(RuntimeError):
        # CUDA keeps the refusal, and the next kernel launched would be blamed for it: let that be this one.
        torch.zeros(1, device="cuda")
    log_event(
        _log, "warning", "memory_not_page_locked", cuda_error=status, mib=memory.nbytes // 2**20, effect=effect,
        remedy="raise the limit of locked memory",
    )  # fmt: skip
    return False


def unlock_pages(memory: ByteArray) -> None:
    """Undo `lock_pages`; harmless where it was refused, or not asked for."""
    address = memory.ctypes.data
    if address in _locked:
        _locked.remove(address)
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        cudart.cudaHostUnregister(address)
