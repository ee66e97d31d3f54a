"""A drafter and a pack as FP8 meets them: outlier channels, rows of very different size, a vocabulary with rare words.

What decides FP8's accuracy is the spread of the entries: a language model's hidden states have a few channels tens of
times as large as the rest, and gains and weights of trained layers are unequal.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_trainer.anchors import Anchors, BlockTargets, build_block_targets, draw_anchors
from drafter_trainer.block_mask import build_block_attention
from drafter_trainer.drafter import DFlashDrafter, initialise_weights
from drafter_trainer.drafter_config import FULL, DrafterConfig
from tests.fakes.drafter_cases import TINY, packed

NUM_FEATURES, OUTLIER_CHANNELS = 2, 4


@dataclass(frozen=True)
class Fp8Case:
    """Everything a forward and backward needs, on one device; `features` [T, n·D], `embedding` and `head` [V, D]."""

    config: DrafterConfig
    pack: dict[str, Tensor]
    anchors: Anchors
    targets: BlockTargets
    features: Tensor
    embedding: Tensor
    head: Tensor

    def arguments(self, kind: str, dtype: torch.dtype) -> tuple:  # type: ignore[type-arg]
        """Of the drafter."""
        layout = DFlashDrafter.attention_layout(_on_meta(self.config), kind)
        attention = build_block_attention(layout, self.anchors, self.pack["position_ids"])
        embeddings = self.embedding[self.targets.block_ids.flatten()].to(dtype)
        positions = self.pack["position_ids"], self.targets.block_positions.flatten()
        return (self.features.to(dtype), embeddings, *positions, attention)


def fp8_case(*, hidden: int, layers: int, vocabulary: int, pack_tokens: int, device: str = "cpu") -> Fp8Case:
    """Sizes in the proportions of Qwen3-8B's drafter; values are numbers of bfloat16."""
    config = dataclasses.replace(
        TINY,
        hidden_size=hidden,
        num_layers=layers,
        layer_types=(FULL,) * layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        intermediate_size=3 * hidden,
        vocab_size=vocabulary,
        mask_token_id=vocabulary - 1,
        block_size=8,
        rope_theta=1e6,
    )
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    pack = packed([pack_tokens // 2, pack_tokens // 3, 9], pack_tokens, seed=1)
    # Tokens of frequencies like words', features with outlier channels and rows of unequal size.
    ranks = (torch.rand(pack_tokens, generator=generator) * torch.log(torch.tensor(float(vocabulary - 1)))).exp()
    pack["input_ids"] = ranks.long().clamp(max=vocabulary - 2).to(pack["input_ids"].dtype)
    features = normal(pack_tokens, NUM_FEATURES * hidden) * (0.5 * normal(pack_tokens, 1)).exp()
    features[:, torch.randperm(features.shape[1], generator=generator)[:OUTLIER_CHANNELS]] *= 60.0
    embedding = 0.03 * normal(vocabulary, hidden) * (0.3 * normal(vocabulary, 1)).exp()
    # Of logits that spread by 1.2 where the final norm is 1, as an untrained drafter's do.
    head = 1.2 * hidden**-0.5 * normal(vocabulary, hidden) * (0.3 * normal(vocabulary, 1)).exp()
    anchors = draw_anchors(pack["loss_mask"], pack["document_ids"], pack_tokens // 8, 0, 0).to(device)
    pack = {name: tensor.to(device) for name, tensor in pack.items()}
    targets = build_block_targets(pack, anchors, block_size=config.block_size, mask_token_id=config.mask_token_id)
    tensors = (tensor.bfloat16().float().to(device) for tensor in (features, embedding, head))
    return Fp8Case(config, pack, anchors, targets, *tensors)


def fp8_drafter(case: Fp8Case, dtype: torch.dtype) -> DFlashDrafter:
    """With the gain of Qwen3-8B's width and rows of unequal size; the same values in every dtype."""
    drafter = DFlashDrafter(case.config)
    generator = torch.Generator().manual_seed(8)
    initialise_weights(drafter, 0, 0.75 + 0.5 * torch.rand(case.config.hidden_size, generator=generator))
    gain = (4096 / case.config.hidden_size) ** 0.5
    with torch.no_grad():
        for parameter in drafter.parameters():
            spread = torch.randn(parameter.shape[:1] + (1,) * (parameter.dim() - 1), generator=generator)
            scale = gain if parameter.dim() == 2 else 1.0
            parameter.copy_((parameter * scale * (0.3 * spread).exp()).bfloat16().float())
    return drafter.to(case.head.device, dtype)


def _on_meta(config: DrafterConfig) -> DFlashDrafter:
    with torch.device("meta"):
        return DFlashDrafter(config)


def cosine(ours: Tensor, theirs: Tensor) -> float:
    """Of two tensors as vectors."""
    return float(torch.cosine_similarity(ours.detach().double().flatten(), theirs.detach().double().flatten(), dim=0))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative, by norm."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())
