"""Real transformers checkpoints of tiny, randomly initialised models, made on the spot."""

from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.glm4 import Glm4Config
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

Family = Literal[
    "llama", "llama3", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "phi3", "glm4"
]
"""`llama3` is Llama with the scaled rotary positions of Llama 3.1; `phi3` and `glm4` rotate half of a head."""
FAMILIES: tuple[Family, ...] = get_args(Family)

_CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "llama3": LlamaConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "phi3": Phi3Config,
    "glm4": Glm4Config,
}
_SLIDING_WINDOW = 8
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


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
    sliding window of 8 tokens, the Gemmas with sliding and full layers by turns; the caps of Gemma 2 are so low that
    they matter. The same arguments give the same weights; the global generator of torch is left as it was.
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
    layer_types = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(num_layers)]
    gemma = {"sliding_window": _SLIDING_WINDOW, "layer_types": layer_types, "query_pre_attn_scalar": head_dim}
    experts = {"num_experts_per_tok": 2}
    half = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    by_family: dict[str, dict[str, Any]] = {
        "llama3": {"rope_parameters": _LLAMA3_ROPE},
        "mistral": {"sliding_window": _SLIDING_WINDOW},
        "mixtral": experts | {"num_local_experts": 4},
        "qwen3_moe": experts | {"num_experts": 4, "moe_intermediate_size": fields["hidden_size"]},
        "gemma2": gemma | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
        "gemma3": gemma,
        "phi3": half,
        "glm4": half,
    }
    return by_family.get(family, {})
