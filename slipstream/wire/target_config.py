"""What a drafter must know of its target's architecture. Travels as canonical JSON in GetTarget."""

from pydantic import BaseModel, ConfigDict


class TargetConfig(BaseModel):
    """Architecture facts of the target, read once by the target server from the loaded model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_type: str
    """transformers' name of the family, e.g. `llama`, `qwen3`, `gemma3_text`."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding and of the head."""
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    embedding_scale: float
    """Factor on embeddings before the first layer (Gemma: sqrt(hidden_size)); 1.0 for most."""
    logit_soft_cap: float | None
    """tanh soft cap on final logits (Gemma 2); None for most."""
    norm_weight_offset: float
    """Added to a norm's stored weight (Gemma: 1.0); 0.0 for most. The served norm.weight already includes it."""
    tokenizer_length: int
    """len(tokenizer): rows from here on are unused."""
    mask_token_id: int | None
    """The tokenizer's own mask token, if it has one."""
    special_tokens: dict[str, int]
    """Added tokens by text, for recipes that name the mask by text."""

    def canonical_json(self) -> str:
        """The JSON that travels: sorted keys, no blanks."""
        import json

        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "TargetConfig":
        """Parse what `canonical_json` wrote.

        Raises:
            pydantic.ValidationError: a key is missing, unknown or of the wrong type.
        """
        return cls.model_validate_json(text)


def frozen_weight_names(tied: bool) -> tuple[str, ...]:
    """Names of the tensors in the frozen-weights payload: all `[V, D]` but `norm.weight` `[D]`."""
    return ("embed_tokens.weight", "norm.weight") if tied else ("embed_tokens.weight", "lm_head.weight", "norm.weight")
