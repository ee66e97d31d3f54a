"""Noise on the target's features in training, so that a drafter does not lean on their last digit (EAGLE: arXiv
2401.15077 adds noise to features for the same reason).

The noise of a pack is a function of `train.seed` and of the pack's number in the stream, never of step, attempt or
process, so that a redelivered pack and a resumed run train identically. CPU and CUDA draw different noise.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


class FeatureNoise:
    """Gaussian noise of `share` times the root mean square of each feature over the pack."""

    def __init__(self, share: float, seed: int, device: torch.device) -> None:
        """`share`: 0 adds nothing and draws nothing. `seed`: `train.seed`."""
        self._share = share
        self._seed = seed
        self._generator = torch.Generator(device)

    def add(self, features: Sequence[Tensor], sequence_number: int) -> list[Tensor]:
        """Features [T, D] of a pack, with noise; in their dtype, on their device, without a host sync.

        Rows of padding get noise too; no block sees them.
        """
        if self._share == 0.0:
            return list(features)
        self._generator.manual_seed(_seed_of_pack(self._seed, sequence_number))
        return [self._with_noise(feature) for feature in features]

    def _with_noise(self, feature: Tensor) -> Tensor:
        noise = torch.empty_like(feature).normal_(generator=self._generator)
        root_mean_square = feature.float().square().mean().sqrt()
        return feature + noise * (self._share * root_mean_square).to(feature.dtype)


def _seed_of_pack(seed: int, sequence_number: int) -> int:
    digest = hashlib.blake2b(f"feature-noise/{seed}/{sequence_number}".encode(), digest_size=8).digest()
    # torch takes 64 bits, signed.
    return int.from_bytes(digest, "little") >> 1
