"""⑩ The DFlash drafter (arXiv 2602.06036).

Draft layers are Qwen3 decoder layers whose attention has queries from the block and keys and values from
[context, block]; the context, one projection of the target's features, is the same for every layer.

Shapes: T context tokens, R = A·B block rows (A anchors, B slots), D hidden size, n features, H heads, d head size.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from drafter_trainer.block_mask import AttentionLayout, BlockAttention
from drafter_trainer.drafter_config import FULL, SLIDING, DFlashConfig
from drafter_trainer.drafter_interface import DraftContext, Drafter
from drafter_trainer.rotary import RotaryTables, rotary_tables, rotate

LayerContext = tuple[Tensor, Tensor]
"""Projected context of one layer: key (normalised, rotated) and value, each [H_kv, S, d]."""
CachedAttention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""Attention while decoding: query [H, R, d], key and value [H_kv, S + R, d], whether the layer slides → [H, R, d]."""

INITIAL_STD = 0.02


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, in float32; output in the input's dtype."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, states: Tensor) -> Tensor:
        """[..., size] → [..., size]."""
        return functional.rms_norm(states.float(), self.weight.shape, self.weight.float(), self.epsilon).to(
            states.dtype
        )


class DraftAttention(nn.Module):
    """Attention from block rows to context and block, with q/k norms, rotary positions and grouped heads."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        width, kv_width = self.num_heads * config.head_dim, self.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, states: Tensor, tables: RotaryTables) -> Tensor:
        """[R, D] → [H, R, d]."""
        heads = self.q_proj(states).unflatten(-1, (self.num_heads, -1))
        return rotate(self.q_norm(heads), tables).transpose(0, 1)

    def keys_and_values(self, states: Tensor, tables: RotaryTables) -> LayerContext:
        """[S, D] → two of [H_kv, S, d]; for context and block alike."""
        keys = self.k_proj(states).unflatten(-1, (self.num_kv_heads, -1))
        values = self.v_proj(states).unflatten(-1, (self.num_kv_heads, -1))
        return rotate(self.k_norm(keys), tables).transpose(0, 1), values.transpose(0, 1)

    def output(self, attended: Tensor) -> Tensor:
        """[H, R, d] → [R, D]."""
        return self.o_proj(attended.transpose(0, 1).flatten(1))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[R, D] → [R, D]."""
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class DraftLayer(nn.Module):
    """One decoder layer, pre-norm, full or sliding."""

    def __init__(self, config: DFlashConfig, layer_type: str) -> None:
        super().__init__()
        self.sliding = layer_type == SLIDING
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, block: Tensor, context: LayerContext, tables: RotaryTables, attention: BlockAttention) -> Tensor:
        """block [R, D], this layer's projected context, tables of the block's positions → [R, D]."""
        states, attend = self.input_layernorm(block), self.self_attn
        queries = attend.queries(states, tables)
        keys, values = attend.keys_and_values(states, tables)
        keys = torch.cat((context[0], keys), dim=1)
        values = torch.cat((context[1], values), dim=1)
        block = block + attend.output(attention(queries, keys, values, self.sliding))
        return block + self.mlp(self.post_attention_layernorm(block))


class CachedBlockAttention:
    """Attention of one block to the context before it, for decoding one document: no mask but a sliding window."""

    def __init__(self, context_length: int, block_size: int, window: int | None, device: torch.device) -> None:
        self.mask: Tensor | None = None
        if window is not None:
            distance = (
                torch.arange(context_length, context_length + block_size, device=device)[:, None]
                - torch.arange(context_length + block_size, device=device)[None, :]
            )
            self.mask = (distance >= 0) & (distance < window)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sliding: bool) -> Tensor:
        """query [H, B, d], key and value [H_kv, S + B, d] → [H, B, d]."""
        mask = self.mask if sliding else None
        return functional.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, enable_gqa=query.shape[0] != key.shape[0]
        )[0]


class DFlashDrafter(Drafter):
    """See the module."""

    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.num_features * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, layer_type) for layer_type in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.recomputed_layers = 0
        """Of the first so many, keep what enters them, and compute them once more in the backward."""

    def recompute_layers(self, count: int) -> None:
        """Less memory, more time, the same bits. The first ones: when the backward comes to them, what the others have
        kept is gone."""
        self.recomputed_layers = count

    def attention_layout(self, kind: Literal["flex", "sdpa"]) -> AttentionLayout:
        """What `build_block_attention` must know of this drafter."""
        types, window = self.config.layer_types, self.config.sliding_window
        return AttentionLayout(kind, self.config.block_size, FULL in types, SLIDING in types, window)

    def fixed_context(self, max_length: int) -> DraftContext:
        """Keys and values, hidden by a mask behind a row's end."""
        from drafter_trainer.evaluation.dflash_contexts import FixedContext

        return FixedContext(self, max_length)

    def growing_context(self) -> DraftContext:
        """Keys and values of the tokens that are there: nothing to be hidden."""
        from drafter_trainer.evaluation.dflash_contexts import GrowingContext

        return GrowingContext(self)

    def forward(
        self,
        features: Tensor,
        block_embeddings: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        attention: BlockAttention,
    ) -> Tensor:
        """[R, D], after the final norm."""
        context = self.project_context(features, context_positions)
        return self._layers(block_embeddings, block_positions, context, attention)

    def project_context(self, features: Tensor, positions: Tensor) -> list[LayerContext]:
        """Keys and values of every layer for context tokens: features [S, n·D], positions int [S].

        A context token's keys and values depend on nothing but its own features, so that a decoder projects newly
        accepted tokens only and appends them along dimension 1.
        """
        context = self.hidden_norm(self.fc(features))
        tables = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        return [layer.self_attn.keys_and_values(context, tables) for layer in self._draft_layers()]

    def draft(
        self,
        block_embeddings: Tensor,
        block_positions: Tensor,
        context: Sequence[LayerContext],
        attention: CachedAttention | None = None,
    ) -> Tensor:
        """Hidden states [B, D] of one block behind a projected context of one document, positions 0 to S - 1.

        Args:
            block_embeddings: [B, D]: the last accepted token, then MASK.
            block_positions: int [B]: S to S + B - 1.
            context: per layer, [H_kv, S, d] each.
            attention: called once a layer, in order, where the caller keeps (part of) the context itself or has the
                blocks of several documents; default: one block sees all of `context`.
        """
        if attention is None:
            window = self.config.sliding_window if SLIDING in self.config.layer_types else None
            device, length = block_embeddings.device, context[0][0].shape[1]
            attention = CachedBlockAttention(length, block_embeddings.shape[0], window, device)
        return self._layers(block_embeddings, block_positions, context, attention)

    def _layers(
        self,
        block: Tensor,
        positions: Tensor,
        context: Sequence[LayerContext],
        attention: BlockAttention | CachedAttention,
    ) -> Tensor:
        tables = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        for index, (layer, layer_context) in enumerate(zip(self._draft_layers(), context, strict=True)):
            arguments = block, layer_context, tables, attention
            if index < self.recomputed_layers and torch.is_grad_enabled():
                # Whole layers, and never reentrant: flex_attention is traced once, with gradients.
                block = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                block = layer(*arguments)
        return self.norm(block)

    def _draft_layers(self) -> list[DraftLayer]:
        return list(self.layers)  # type: ignore[arg-type]


@torch.no_grad()
def initialise_weights(drafter: Drafter, seed: int, final_norm: Tensor) -> None:
    """Fill the drafter in place: matrices normal(0, 0.02), norms one, the final norm as the target's.

    The final norm matters: hidden states of another scale than the frozen head expects start at a loss of 70. Values
    are drawn on the CPU in float32 and in the order of the parameters, so that they do not depend on the device.

    Args:
        drafter: on any device, in any dtype.
        seed: `train.seed`.
        final_norm: the target's `norm.weight` [D].
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2:
            drawn = torch.empty(parameter.shape).normal_(0.0, INITIAL_STD, generator=generator)
            parameter.copy_(drawn)
        elif name == "norm.weight":
            parameter.copy_(final_norm)
        else:
            parameter.fill_(1.0)
