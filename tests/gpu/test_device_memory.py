"""The copy that a checkpoint is written from, and the allocator's peaks, on a real device."""

import pytest
import torch

from drafter_trainer.checkpoint_writer import HostCopy
from drafter_trainer.memory import MemoryMeter

MIB = 1 << 20


def test_a_copy_holds_what_was_there_although_training_goes_on() -> None:
    device = torch.device("cuda", 0)
    weights = torch.arange(16 * MIB, device=device, dtype=torch.float32)
    state = {
        "drafter": {"a": weights[: 8 * MIB].view(1024, -1), "b": weights[8 * MIB :]},
        "optimizer": {"step": torch.ones((), device=device)},
    }
    expected = weights.cpu()
    copy = HostCopy(state)
    assert copy.take(state)["drafter"]["a"].is_pinned()
    copy.wait()
    for _ in range(3):
        copied = copy.take(state)
        # The next step, launched at once.
        weights.mul_(-1.0)
        copy.wait()
        assert torch.equal(copied["drafter"]["a"].flatten(), expected[: 8 * MIB])
        assert torch.equal(copied["drafter"]["b"], expected[8 * MIB :])
        assert copied["optimizer"]["step"].item() == 1.0
        weights.mul_(-1.0)
        torch.cuda.synchronize()


def test_peaks_belong_to_their_phases() -> None:
    device = torch.device("cuda", 0)
    meter = MemoryMeter(device)
    before = torch.cuda.memory_allocated(device)
    for _ in range(2):
        meter.begin()
        held = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
        meter.ended("forward", 128)
        for_a_moment = torch.empty(128 * MIB, dtype=torch.uint8, device=device)
        del for_a_moment
        meter.ended("loss", 128)
        del held
        meter.ended("backward", 128)
    meter.close()
    meter.ended("never", 128)
    peaks = {phase: peak - before for phase, peak in meter.peaks().items()}
    expected = {"forward": 64 * MIB, "loss": 192 * MIB, "backward": 64 * MIB}
    assert peaks == pytest.approx(expected, rel=0.02)
    assert meter.largest_reserved >= 192 * MIB
