"""⑬ Saves while training goes on: the training thread copies the state, a thread of its own writes the copy.

One save is in flight at most; the next one waits for it. A failed one is raised in the training thread. The writing
thread reads host memory and files only: never a device, compiled code or autograd.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from drafter_trainer.checkpoint import Checkpoint, save_checkpoint
from drafter_trainer.run_directory import RunDirectory
from slipstream.errors import SlipstreamError
from slipstream.machine_probe import memory_bytes
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event

# Page-locked memory is handed out in powers of two: pieces of this size waste none, however large the drafter is.
_PIECE_BYTES = 1 << 28
_ALIGNMENT = 64

_log = logging.getLogger(__name__)


class HostCopy:
    """Host memory for one state of a drafter, allocated once; page-locked where the state is on a GPU."""

    def __init__(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """`state`: tensors by group and name, in the shapes that every later copy has."""
        self._device = next(tensor.device for group in state.values() for tensor in group.values())
        on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        self._copied = torch.cuda.Event() if on_gpu else None
        places = _Places(pin_memory=on_gpu)
        self._host = {
            name: {key: places.like(tensor) for key, tensor in group.items()} for name, group in state.items()
        }

    def take(self, state: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Mapping[str, Tensor]]:
        """Copy; on a GPU the copy may still run on return, and work launched from now on waits for it there.

        Returns:
            The host's tensors, which hold the copy once `wait` has returned, until the next `take`.
        """
        if self._stream is None or self._copied is None:
            self._copy(state)
            return self._host
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            self._copy(state)
            self._copied.record()
        computing.wait_event(self._copied)
        return self._host

    def wait(self) -> None:
        """Until the copy is complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name, group in state.items():
            for key, tensor in group.items():
                self._host[name][key].copy_(tensor.detach(), non_blocking=True)


class _Places:
    """Gives out tensors in host memory, many of them out of one piece."""

    def __init__(self, *, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def like(self, tensor: Tensor) -> Tensor:
        """Of the same shape and dtype, contiguous."""
        size = tensor.numel() * tensor.element_size()
        if self._used + size > self._piece.numel():
            self._piece = torch.empty(max(size, _PIECE_BYTES), dtype=torch.uint8, pin_memory=self._pin_memory)
            self._used = 0
        place = self._piece[self._used : self._used + size].view(tensor.dtype).view(tensor.shape)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place


def require_host_memory(state: Mapping[str, Mapping[str, Tensor]], *, available: int) -> None:
    """Refuse to page-lock more of the host's memory than there is: the system would end some process for it.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED. Never where the state is not on a GPU: that memory is taken as needed.
    """
    tensors = [tensor for group in state.values() for tensor in group.values()]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if needed > available and any(tensor.is_cuda for tensor in tensors):
        raise SlipstreamError(
            f"Checkpoints are written from a copy in the host's memory: {needed / 2**30:.1f} GiB, of which "
            f"{available / 2**30:.1f} are available.",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Raise the container's memory limit, end other programs of this machine, or lower "
            "drafter.num_layers; slipstream plan says what a checkpoint needs.",
        )


class CheckpointWriter:
    """The one that saves a run's checkpoints. All methods are for the training thread."""

    def __init__(
        self,
        run: RunDirectory,
        incarnation_held: Callable[[], AbstractContextManager[int]],
        *,
        keep: int,
        before_saving: Callable[[], None],
    ) -> None:
        """
        Args:
            run: where.
            incarnation_held: see `save_checkpoint`.
            keep: newest checkpoints that stay.
            before_saving: called, in the writing thread, before the files of a checkpoint are written.
        """
        self._run = run
        self._incarnation_held = incarnation_held
        self._keep = keep
        self._before_saving = before_saving
        self._copy: HostCopy | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.newest: Path | None = None
        """The checkpoint that was completed last."""
        self.blocked_seconds = 0.0
        """Time that the training thread has spent in `save`, since the process began."""

    def prepare(self, checkpoint_tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Allocate the memory of the copies: page-locking gigabytes takes seconds, better before the first step.

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED, the host has less than a copy needs.
        """
        require_host_memory(checkpoint_tensors, available=memory_bytes()[1])
        self._copy = HostCopy(checkpoint_tensors)

    def save(self, checkpoint: Checkpoint) -> None:
        """Wait for the save before, copy the state, begin to write it.

        Raises:
            SlipstreamError: what made the save before fail.
        """
        began = time.monotonic()
        self.finish()
        waited = time.monotonic() - began
        state = {"drafter": checkpoint.drafter, "optimizer": checkpoint.optimizer}
        if self._copy is None:
            self.prepare(state)
        assert self._copy is not None
        copied = self._copy.take(state)
        checkpoint = dataclasses.replace(checkpoint, drafter=copied["drafter"], optimizer=copied["optimizer"])
        blocked = time.monotonic() - began
        self.blocked_seconds += blocked
        self._thread = threading.Thread(
            target=self._write, args=(self._copy, checkpoint, waited, blocked), name="checkpoint-writer", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise what made a save fail, without waiting for one that is being written."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def finish(self) -> None:
        """Wait until the last checkpoint is in its place.

        Raises:
            SlipstreamError: INCARNATION_STALE, DISK_FULL: it is not.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def close(self) -> None:
        """The same for a run that ends with another failure: what fails here as well is only logged."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            log_event(_log, "warning", "checkpoint_not_saved", detail=str(self._failure))

    def _write(self, copy: HostCopy, checkpoint: Checkpoint, waited: float, blocked: float) -> None:
        began = time.monotonic()
        try:
            copy.wait()
            self._before_saving()
            self.newest = save_checkpoint(
                self._run, checkpoint, keep=self._keep, incarnation_held=self._incarnation_held
            )
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: the training thread raises it
            self._failure = error
            return
        log_event(
            _log,
            "info",
            "checkpoint_saved",
            step=checkpoint.state.cursor.next_step,
            directory=str(self.newest),
            seconds=round(time.monotonic() - began, 3),
            training_waited=round(blocked, 3),
            of_it_for_the_one_before=round(waited, 3),
        )
