"""What the measuring process asks of a side."""

from typing import Protocol

from benchmarks.peers.workload import Pack


class Side(Protocol):
    """One implementation of the training step, built and on the device, with the weights of `drafter_weights`."""

    description: str
    """What runs, in words: model, attention, loss, optimizer."""
    split_features: bool
    """Takes features one by one, as a target server sends them, or concatenated."""

    def step(self, pack: Pack) -> None:
        """Launch one optimizer step; need not wait for the device."""

    def last_loss(self) -> float:
        """Loss of the newest step; waits for the device."""


class SideUnavailableError(Exception):
    """This side cannot run here; the text says why and what to do."""
