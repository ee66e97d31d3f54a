"""Tiny drafters and packs for the drafter's tests: several documents, gaps in the loss mask, padding at the end."""

from dataclasses import replace

import torch
from torch import Tensor

from drafter_trainer.anchors import Anchors
from drafter_trainer.drafter import DFlashDrafter, initialise_weights
from drafter_trainer.drafter_config import FULL, SLIDING, DFlashConfig

VOCAB = 37
MASK_TOKEN = 36

TINY = DFlashConfig(
    target_model_type="llama",
    num_target_layers=8,
    target_layer_ids=(1, 4),
    vocab_size=VOCAB,
    mask_token_id=MASK_TOKEN,
    embedding_scale=1.0,
    logit_soft_cap=None,
    block_size=7,
    hidden_size=12,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=20,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    max_position_embeddings=512,
    layer_types=(FULL, FULL),
    sliding_window=None,
)


def tiny_config(block_size: int, *, window: int | None = None) -> DFlashConfig:
    """A two-layer drafter; with a window its second layer slides."""
    types = (FULL, FULL) if window is None else (FULL, SLIDING)
    return replace(TINY, block_size=block_size, layer_types=types, sliding_window=window)


def tiny_drafter(config: DFlashConfig, *, seed: int = 0) -> DFlashDrafter:
    """Weights large enough that every part of the drafter matters to the result; norms unlike one."""
    drafter = DFlashDrafter(config)
    generator = torch.Generator().manual_seed(seed + 1)
    initialise_weights(drafter, seed, torch.rand(config.hidden_size, generator=generator) + 0.5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(15.0)
            else:
                parameter.mul_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return drafter


def packed(lengths: list[int], pack_tokens: int, *, seed: int = 0, supervised: float = 0.9) -> dict[str, Tensor]:
    """A pack of documents of these lengths; about a tenth of the tokens is unsupervised, in gaps."""
    generator = torch.Generator().manual_seed(seed)
    used = sum(lengths)
    documents = torch.full((pack_tokens,), -1, dtype=torch.int32)
    positions = torch.zeros(pack_tokens, dtype=torch.int32)
    documents[:used] = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))
    positions[:used] = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
    token_ids = torch.randint(0, VOCAB - 1, (pack_tokens,), generator=generator).int()
    loss_mask = (torch.rand(pack_tokens, generator=generator) < supervised).to(torch.uint8)
    padding = documents < 0
    token_ids[padding], loss_mask[padding] = 0, 0
    return {"input_ids": token_ids, "loss_mask": loss_mask, "document_ids": documents, "position_ids": positions}


def random_lengths(pack_tokens: int, generator: torch.Generator) -> list[int]:
    """Document lengths that leave some padding."""
    lengths = []
    free = pack_tokens - int(torch.randint(0, 9, (1,), generator=generator))
    while free > 0:
        lengths.append(min(free, int(torch.randint(1, pack_tokens // 2, (1,), generator=generator))))
        free -= lengths[-1]
    return lengths


def as_lists(pack: dict[str, Tensor]) -> dict[str, list[int]]:
    """The pack as the dense reference reads it."""
    return {name: tensor.tolist() for name, tensor in pack.items()}


def anchor_list(anchors: Anchors) -> list[int | None]:
    """The anchors as the dense reference reads them."""
    return [p if v else None for p, v in zip(anchors.positions.tolist(), anchors.valid.tolist(), strict=True)]
