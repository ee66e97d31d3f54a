"""A DFlash drafter (arXiv 2602.06036) for transformers, in one file that travels with the weights.

    from transformers import AutoModel, AutoModelForCausalLM
    drafter = AutoModel.from_pretrained(DIRECTORY, trust_remote_code=True)
    target = AutoModelForCausalLM.from_pretrained(TARGET)
    drafter.spec_generate(target, input_ids, max_new_tokens=128, stop_token_ids=[...])

A block is the last accepted token and B - 1 times MASK. Its hidden states at slots 1 … B - 1, through the target's
head, propose the next B - 1 tokens. The context is one projection of the outputs of some target layers, for every token
before the block.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, Qwen3Config


class DFlashRMSNorm(nn.Module):
    """In float32, whatever comes in."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale * self.weight.float()).to(states.dtype)


class DFlashAttention(nn.Module):
    """Queries from the block; keys and values from [context, block]."""

    def __init__(self, config: Qwen3Config, layer_type: str) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.window = config.sliding_window if layer_type == "sliding_attention" else None
        hidden = config.hidden_size
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=False)
        self.q_norm = DFlashRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = DFlashRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, block: Tensor, context: Tensor, position_ids: Tensor, angles: Tensor) -> Tensor:
        """block [N, B, D], context [N, S, D], position_ids [N, S + B], angles [N, S + B, d/2] → [N, B, D]."""
        size = block.shape[1]
        both = torch.cat((context, block), dim=1)
        query = _turn(self.q_norm(self._heads(self.q_proj(block))), angles[:, -size:])
        key = _turn(self.k_norm(self._heads(self.k_proj(both))), angles)
        value = self._heads(self.v_proj(both))
        mask = None
        if self.window is not None:
            distance = position_ids[:, -size:, None] - position_ids[:, None, :]
            mask = ((distance >= 0) & (distance < self.window))[:, None]
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, enable_gqa=True
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim))


class DFlashMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))


class DFlashLayer(nn.Module):
    """A decoder layer, pre-norm."""

    def __init__(self, config: Qwen3Config, layer_type: str) -> None:
        super().__init__()
        self.input_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DFlashAttention(config, layer_type)
        self.post_attention_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DFlashMLP(config)

    def forward(self, block: Tensor, context: Tensor, position_ids: Tensor, angles: Tensor) -> Tensor:
        block = block + self.self_attn(self.input_layernorm(block), context, position_ids, angles)
        return block + self.mlp(self.post_attention_layernorm(block))


class DFlashDraftModel(PreTrainedModel):
    """The trained weights; embedding and head are the target's."""

    config_class = Qwen3Config
    _no_split_modules = ["DFlashLayer"]  # noqa: RUF012 - as transformers declares it
    _supports_sdpa = True

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.target_layer_ids = list(config.dflash_config["target_layer_ids"])
        self.mask_token_id = config.dflash_config["mask_token_id"]
        self.block_size = config.block_size
        self.fc = nn.Linear(len(self.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config, layer_type) for layer_type in config.layer_types)
        self.norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, noise_embedding: Tensor, target_hidden: Tensor, position_ids: Tensor) -> Tensor:
        """Hidden states of one block, after the final norm.

        Args:
            noise_embedding: [N, B, D], [last token, MASK, …] as the target embeds them.
            target_hidden: [N, S, n·D], outputs of the target layers, concatenated, for all S tokens before the block.
            position_ids: int [N, S + B], of context and block.
        """
        context = self.hidden_norm(self.fc(target_hidden))
        angles = self._angles(position_ids)
        block = noise_embedding
        for layer in self.layers:
            block = layer(block, context, position_ids, angles)
        return self.norm(block)

    @torch.inference_mode()
    def spec_generate(
        self, target: PreTrainedModel, input_ids: Tensor, max_new_tokens: int, stop_token_ids: Sequence[int] = ()
    ) -> Tensor:
        """Greedy speculative decoding of one prompt [1, P] → [1, P + new]; equals the target's greedy decoding.

        Plain on purpose: the target reads the whole text in every round. Servers keep caches.
        """
        text = input_ids
        end = input_ids.shape[1] + max_new_tokens
        logits, features = self._read(target, text)
        text = torch.cat((text, logits[:, -1:].argmax(-1)), dim=1)
        while text.shape[1] < end and text[0, -1].item() not in stop_token_ids:
            drafts = self.propose(target, features, text[:, -1:])
            logits, features = self._read(target, torch.cat((text, drafts), dim=1))
            choices = logits[:, -self.block_size :].argmax(-1)
            matched = int((choices[0, :-1] == drafts[0]).long().cumprod(0).sum())
            new = choices[:, : matched + 1]
            for place, token in enumerate(new[0].tolist()):
                if token in stop_token_ids:
                    new = new[:, : place + 1]
                    break
            text = torch.cat((text, new), dim=1)
            features = features[:, : text.shape[1] - 1]
        return text[:, :end]

    def propose(self, target: PreTrainedModel, target_hidden: Tensor, last_token: Tensor) -> Tensor:
        """Drafts int [1, B - 1] behind last_token [1, 1]; target_hidden [1, S, n·D] of all tokens before it."""
        length = target_hidden.shape[1]
        masks = torch.full((1, self.block_size - 1), self.mask_token_id, device=last_token.device)
        embedding = target.get_input_embeddings()(torch.cat((last_token, masks), dim=1))
        positions = torch.arange(length + self.block_size, device=last_token.device)[None]
        hidden = self(embedding.to(self.dtype), target_hidden.to(self.dtype), positions)
        head = target.get_output_embeddings()
        return head(hidden[:, 1:].to(head.weight.dtype)).argmax(-1)

    def _read(self, target: PreTrainedModel, text: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and features of all tokens; a feature is what leaves a decoder layer, before any final norm."""
        decoder = target.get_decoder() if hasattr(target, "get_decoder") else target.model
        left: dict[int, Tensor] = {}

        def keep(number: int) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                left[number] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [decoder.layers[number].register_forward_hook(keep(number)) for number in self.target_layer_ids]
        try:
            logits = target(input_ids=text, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        return logits, torch.cat([left[number] for number in self.target_layer_ids], dim=-1)

    def _angles(self, position_ids: Tensor) -> Tensor:
        """[N, L, d/2], float32."""
        size, theta = self.config.head_dim, self.config.rope_parameters["rope_theta"]
        steps = torch.arange(0, size, 2, dtype=torch.float32, device=position_ids.device) / size
        return position_ids[..., None].float() / theta**steps


def _turn(states: Tensor, angles: Tensor) -> Tensor:
    """Rotate states [N, L, H, d], pairing dimension i with i + d/2, in float32."""
    cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
    first, second = states.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(states.dtype)
