"""Real transformers checkpoints of tiny, randomly initialised models, made on the spot."""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

Family = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3"]

_CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
}
_SLIDING_WINDOW = 8


def save_tiny_model(
    directory: Path,
    family: Family = "llama",
    *,
    vocab_size: int,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> PretrainedConfig:
    """Write config.json and model.safetensors of a random model into `directory` (made if missing); no tokenizer.

    `sizes` may name `num_layers` (4) and `hidden_size` (64); anything else goes to the family's config as it is. Four
    query heads, two key/value heads, the MLP twice as wide as the residual stream. Mistral and both Gemmas get a
    sliding window of 8 tokens, the Gemmas with sliding and full layers by turns. The same arguments give the same
    weights; the global generator of torch is left as it was.
    """
    hidden_size = sizes.pop("hidden_size", 64)
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "num_hidden_layers": sizes.pop("num_layers", 4),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = _CONFIGS[family](**(fields | _family_fields(family, fields) | sizes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        # Norms start as the identity, which would hide a norm that is skipped or applied twice.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(directory)
    return config


def _family_fields(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    num_layers, head_dim = fields["num_hidden_layers"], fields["head_dim"]
    if family == "mistral":
        return {"sliding_window": _SLIDING_WINDOW}
    if family in ("gemma2", "gemma3"):
        layer_types = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(num_layers)]
        return {"sliding_window": _SLIDING_WINDOW, "layer_types": layer_types, "query_pre_attn_scalar": head_dim}
    if family == "qwen3_moe":
        return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": fields["hidden_size"]}
    return {}
