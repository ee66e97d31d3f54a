"""Noise belongs to the pack: the same on every delivery, another for every pack and seed, of the size asked for."""

import pytest
import torch
from torch import Tensor

from drafter_trainer.feature_noise import FeatureNoise

CPU = torch.device("cpu")


def features(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(scale * torch.randn(512, 64, generator=generator)).to(dtype) for scale in (1.0, 100.0)]


def noisy(share: float = 0.1, seed: int = 3, pack: int = 7) -> list[Tensor]:
    return FeatureNoise(share, seed, CPU).add(features(), pack)


def test_noise_depends_on_seed_and_pack_alone() -> None:
    noise = FeatureNoise(0.1, 3, CPU)
    torch.manual_seed(99)
    noise.add(features(), 6)
    again = noise.add(features(), 7)
    assert all(torch.equal(a, b) for a, b in zip(again, noisy(), strict=True))
    assert not torch.equal(again[0], noisy(pack=8)[0])
    assert not torch.equal(again[0], noisy(seed=4)[0])


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    noisy()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_is_a_share_of_each_features_size(dtype: torch.dtype) -> None:
    clean = features(dtype)
    added = FeatureNoise(0.1, 3, CPU).add(clean, 7)
    for before, after, size in zip(clean, added, (1.0, 100.0), strict=True):
        assert after.dtype == dtype
        difference = (after.float() - before.float()) / size
        assert difference.std().item() == pytest.approx(0.1, rel=0.03)
        assert abs(difference.mean().item()) < 0.003


def test_no_noise_is_the_features_themselves() -> None:
    clean = features()
    assert all(a is b for a, b in zip(FeatureNoise(0.0, 3, CPU).add(clean, 7), clean, strict=True))
