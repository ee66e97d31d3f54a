"""Page-locks the memory of an arena for the GPU: a copy from the device into it then runs at the speed of the bus."""

import logging

import torch

from slipstream.telemetry.logs import log_event
from slipstream.wire.arena import PayloadArena

_log = logging.getLogger(__name__)


def lock_pages(arena: PayloadArena, device: torch.device) -> None:
    """Register every slot with CUDA. Without a GPU there is nothing to do; a refusal costs speed and is logged."""
    if device.type != "cuda":
        return
    status = int(torch.cuda.cudart().cudaHostRegister(_address(arena), _size(arena), 0))
    if status != 0:
        log_event(
            _log, "warning", "shelf_not_page_locked", cuda_error=status, mib=_size(arena) // 2**20,
            effect="copies from the GPU are about three times slower", remedy="raise the limit of locked memory",
        )  # fmt: skip


def unlock_pages(arena: PayloadArena, device: torch.device) -> None:
    """Undo `lock_pages`, before the memory is given back. Harmless when the lock was refused."""
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(_address(arena))


def _address(arena: PayloadArena) -> int:
    address: int = arena.slot(0).ctypes.data
    return address


def _size(arena: PayloadArena) -> int:
    return arena.num_slots * arena.slot_bytes
