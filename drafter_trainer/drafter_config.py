"""What a drafter is: every size resolved from the recipe and the target, so that files and code agree."""

import dataclasses
import json
import logging
from dataclasses import dataclass

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DrafterSpec
from slipstream.wire.target_config import TargetConfig
from slipstream.wire.tensor_names import hidden_state_name

FULL = "full_attention"
SLIDING = "sliding_attention"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrafterConfig:
    """Architecture of a DFlash drafter; enough to build it and to decode with it."""

    target_model_type: str
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    """Zero-based target layers whose outputs are the features, ascending; they are concatenated in this order."""
    vocab_size: int
    mask_token_id: int
    embedding_scale: float
    """The target's factor on embeddings; block embeddings handed to the drafter already include it."""
    logit_soft_cap: float | None
    """The target's tanh cap on final logits."""
    block_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    """Per draft layer, full_attention or sliding_attention."""
    sliding_window: int | None

    @property
    def num_features(self) -> int:
        """Target layers that feed the drafter (n)."""
        return len(self.target_layer_ids)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features in a pack's payload, in the order of concatenation."""
        return tuple(hidden_state_name(layer) for layer in self.target_layer_ids)

    def to_json(self) -> str:
        """The JSON that a checkpoint holds."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "DrafterConfig":
        """Parse what `to_json` wrote.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID, a key is missing or unknown, or it is no JSON object.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise _config_invalid(f"the drafter's configuration is not JSON: {error}") from error
        expected = {field.name for field in dataclasses.fields(cls)}
        found = set(values) if isinstance(values, dict) else set()
        if found != expected:
            raise _config_invalid(
                f"the drafter's configuration lacks {sorted(expected - found)}, "
                f"and has the unknown keys {sorted(found - expected)}"
            )
        for name in ("target_layer_ids", "layer_types"):
            values[name] = tuple(values[name])
        return cls(**values)


def default_target_layer_ids(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Zero-based layers spread as DFlash does (arXiv 2602.06036).

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE, the target is too shallow for so many different layers.
    """
    if num_features == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_features - 1)
    layers = tuple(round(1 + i * step) for i in range(num_features))
    if len(set(layers)) != num_features or min(layers) < 0:
        raise SlipstreamError(
            f"{num_features} different features were asked for, the target has {num_target_layers} layers and the "
            f"default spread needs at least {num_features + 3}",
            reason=Reason.TARGET_INCOMPATIBLE,
            remedy="Lower drafter.num_features or name drafter.target_layer_ids.",
        )
    return layers


def resolve_mask_token_id(spec: DrafterSpec, target: TargetConfig) -> int:
    """The vocabulary row for MASK: explicit id, the tokenizer's own mask token, an unused row, the named token.

    Raises:
        SlipstreamError: SPEC_INVALID, the id is outside the vocabulary, the named token does not exist, or none of the
            four gives a row.
    """
    named = None if spec.mask_token is None else target.special_tokens.get(spec.mask_token)
    if spec.mask_token is not None and named is None:
        known = ", ".join(sorted(target.special_tokens)[:8]) or "none"
        raise SlipstreamError(
            f"drafter.mask_token is {spec.mask_token!r}, which is no special token of the target (it has: {known})",
            reason=Reason.SPEC_INVALID,
            remedy="Name one of its special tokens that no answer contains.",
        )
    unused = target.tokenizer_length if target.tokenizer_length < target.vocab_size else None
    for row in (spec.mask_token_id, target.mask_token_id, unused, named):
        if row is not None:
            break
    else:
        raise SlipstreamError(
            f"the target has no mask token and no unused row (tokenizer {target.tokenizer_length} tokens, vocabulary "
            f"{target.vocab_size} rows), and the recipe names no mask token.",
            reason=Reason.SPEC_INVALID,
            remedy="Set drafter.mask_token to a special token that no answer contains.",
        )
    if row >= target.vocab_size:
        raise SlipstreamError(
            f"the mask is row {row}, the target's vocabulary has {target.vocab_size} rows",
            reason=Reason.SPEC_INVALID,
            remedy="Set drafter.mask_token_id to a row inside the vocabulary.",
        )
    if named is not None and row != named:
        _logger.warning("mask_token %r (row %d) is not used: the target offers row %d", spec.mask_token, named, row)
    return row


def resolve_drafter_config(spec: DrafterSpec, target: TargetConfig) -> DrafterConfig:
    """Fill in every size that the recipe leaves to the target, and check that they fit.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE, layers that the target does not have; SPEC_INVALID, sizes that do not
            divide, or no mask token.
    """
    layers = spec.target_layer_ids or default_target_layer_ids(target.num_layers, spec.num_features or spec.num_layers)
    if max(layers) >= target.num_layers:
        raise SlipstreamError(
            f"drafter.target_layer_ids names layer {max(layers)}, the target has layers 0 to {target.num_layers - 1}",
            reason=Reason.TARGET_INCOMPATIBLE,
            remedy="Name layers that the target has, or leave target_layer_ids out.",
        )
    config = DrafterConfig(
        target_model_type=target.model_type,
        num_target_layers=target.num_layers,
        target_layer_ids=tuple(sorted(layers)),
        vocab_size=target.vocab_size,
        mask_token_id=resolve_mask_token_id(spec, target),
        embedding_scale=target.embedding_scale,
        logit_soft_cap=target.logit_soft_cap,
        block_size=spec.block_size,
        hidden_size=target.hidden_size,
        num_layers=spec.num_layers,
        num_attention_heads=spec.num_attention_heads or target.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads or target.num_key_value_heads,
        head_dim=spec.head_dim or target.head_dim,
        intermediate_size=spec.intermediate_size or target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
        layer_types=spec.layer_types or (FULL,) * spec.num_layers,
        sliding_window=spec.sliding_window,
    )
    _check_heads(config)
    return config


def _check_heads(config: DrafterConfig) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise SlipstreamError(
            f"{config.num_attention_heads} attention heads are no multiple of {config.num_key_value_heads} "
            "key/value heads",
            reason=Reason.SPEC_INVALID,
            remedy="Set drafter.num_attention_heads and drafter.num_key_value_heads so that they divide.",
        )
    if config.head_dim % 2:
        raise SlipstreamError(
            f"head_dim is {config.head_dim}, rotary positions need an even one",
            reason=Reason.SPEC_INVALID,
            remedy="Set drafter.head_dim to an even number.",
        )


def _config_invalid(message: str) -> SlipstreamError:
    return SlipstreamError(
        message,
        reason=Reason.CHECKPOINT_INVALID,
        remedy="Use a checkpoint that this version wrote, or start a new run.",
    )
