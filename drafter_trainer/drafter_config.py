"""What a drafter is: every size resolved from the recipe and the target, so that files and code agree.

`DrafterConfig` is what every architecture's configuration says, `DFlashConfig` that of DFlash.
"""

import dataclasses
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from drafter_trainer.drafter_registry import configuration_of, failures_of_package
from slipstream.errors import SlipstreamError
from slipstream.mask_token import mask_row
from slipstream.run_spec.architectures import DFLASH
from slipstream.run_spec.head_sizes import require_heads
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DrafterSpec
from slipstream.run_spec.target_layers import target_layers
from slipstream.wire.target_config import TargetConfig
from slipstream.wire.tensor_names import hidden_state_name

if TYPE_CHECKING:
    from drafter_trainer.drafter_interface import Drafter

FULL = "full_attention"
SLIDING = "sliding_attention"
_OF_EVERY_ARCHITECTURE = frozenset(
    ("architecture", "block_size", "num_features", "target_layer_ids", "mask_token_id", "mask_token", "init_from")
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrafterConfig:
    """Enough to build a drafter and to decode with it. An architecture has a subclass, with fields of its own: numbers,
    texts, and tuples of them."""

    architecture: ClassVar[str]
    """Its name in recipes and checkpoints, and that of its entry point."""
    reads: ClassVar[frozenset[str]] = frozenset()
    """Settings of [drafter] that decide its own fields, `options.NAME` among them; all others but those of every
    architecture are refused."""

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
    rms_norm_eps: float
    """Of the target's final norm."""

    @classmethod
    def resolve(cls, spec: DrafterSpec, target: TargetConfig) -> Self:
        """The configuration for a recipe and a target; begins with `shared_fields`.

        Raises:
            SlipstreamError: SPEC_INVALID, TARGET_INCOMPATIBLE.
        """
        raise NotImplementedError

    def build(self) -> "Drafter":
        """A drafter of these sizes; its weights mean nothing."""
        raise NotImplementedError

    @property
    def num_features(self) -> int:
        """Target layers that feed the drafter (n)."""
        return len(self.target_layer_ids)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features in a pack's payload, in the order of concatenation."""
        return tuple(hidden_state_name(layer) for layer in self.target_layer_ids)

    @property
    def attention_head_dim(self) -> int | None:
        """Width of a head in block attention; None: it does not attend."""
        return None

    @property
    def context_width(self) -> int:
        """Numbers that a context token becomes besides its projected features, all layers together."""
        return 0

    def to_json(self) -> str:
        """The JSON that a checkpoint holds."""
        values = {"architecture": self.architecture} | dataclasses.asdict(self)
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str) -> "DrafterConfig":
        """Parse what `to_json` wrote, by the architecture that it names; what names none is DFlash's.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID, a key is missing or unknown, it is no JSON object, or its architecture
                is not installed here.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise _config_invalid(f"the drafter's configuration is not JSON: {error}") from error
        values = values if isinstance(values, dict) else {}
        kind = configuration_of(values.pop("architecture", DFLASH), Reason.CHECKPOINT_INVALID)
        expected, found = {field.name for field in dataclasses.fields(kind)}, set(values)
        if found != expected:
            raise _config_invalid(
                f"the drafter's configuration lacks {sorted(expected - found)}, "
                f"and has the unknown keys {sorted(found - expected)}"
            )
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        with failures_of_package(kind.architecture, "it does not read its own configuration"):
            return kind(**(values | lists))


@dataclass(frozen=True)
class DFlashConfig(DrafterConfig):
    """Of a DFlash drafter."""

    architecture: ClassVar[str] = DFLASH
    reads: ClassVar[frozenset[str]] = frozenset(
        (
            *("num_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
            *("layer_types", "sliding_window"),
        )
    )

    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    """Per draft layer, full_attention or sliding_attention."""
    sliding_window: int | None

    @classmethod
    def resolve(cls, spec: DrafterSpec, target: TargetConfig) -> Self:
        """Sizes left out are the target's.

        Raises:
            SlipstreamError: TARGET_INCOMPATIBLE, layers that the target does not have; SPEC_INVALID, sizes that do not
                divide, or no mask token.
        """
        config = cls(
            **shared_fields(spec, target),
            num_layers=spec.num_layers,
            num_attention_heads=spec.num_attention_heads or target.num_attention_heads,
            num_key_value_heads=spec.num_key_value_heads or target.num_key_value_heads,
            head_dim=spec.head_dim or target.head_dim,
            intermediate_size=spec.intermediate_size or target.intermediate_size,
            rope_theta=target.rope_theta,
            max_position_embeddings=target.max_position_embeddings,
            layer_types=spec.layer_types or (FULL,) * spec.num_layers,
            sliding_window=spec.sliding_window,
        )
        require_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        return config

    def build(self) -> "Drafter":
        """See `DFlashDrafter`."""
        from drafter_trainer.drafter import DFlashDrafter

        return DFlashDrafter(self)

    @property
    def attention_head_dim(self) -> int:
        """The same in all layers."""
        return self.head_dim

    @property
    def context_width(self) -> int:
        """Keys and values."""
        return 2 * self.num_layers * self.num_key_value_heads * self.head_dim


def resolve_mask_token_id(spec: DrafterSpec, target: TargetConfig) -> int:
    """The vocabulary row for MASK, see `mask_row`; a token that is named and not taken is said in the log.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    row = mask_row(spec, target)
    named = None if spec.mask_token is None else target.special_tokens[spec.mask_token]
    if named is not None and row != named:
        _logger.warning("mask_token %r (row %d) is not used: the target offers row %d", spec.mask_token, named, row)
    return row


def resolve_drafter_config(spec: DrafterSpec, target: TargetConfig) -> DrafterConfig:
    """Fill in every size that the recipe leaves to the target, as the recipe's architecture does.

    Raises:
        SlipstreamError: SPEC_INVALID, the architecture is not installed, or does not read what is set;
            ENVIRONMENT_UNSUPPORTED, its package fails; what `resolve` raises.
    """
    kind = configuration_of(spec.architecture, Reason.SPEC_INVALID)
    fields = type(spec).model_fields
    given = {name: getattr(spec, name) for name, field in fields.items() if getattr(spec, name) != field.default}
    given |= {f"options.{name}": value for name, value in given.pop("options", {}).items()}
    unread = sorted(given.keys() - kind.reads - _OF_EVERY_ARCHITECTURE)
    if unread:
        raise SlipstreamError(
            f"the architecture {spec.architecture} does not read "
            f"{', '.join(f'drafter.{name} = {given[name]!r}' for name in unread)}",
            reason=Reason.SPEC_INVALID,
            remedy=f"Leave it out. It reads {', '.join(sorted(kind.reads)) or 'nothing'} besides "
            f"{', '.join(sorted(_OF_EVERY_ARCHITECTURE))}.",
        )
    with failures_of_package(spec.architecture, "it cannot resolve the settings of [drafter]"):
        return kind.resolve(spec, target)


def shared_fields(spec: DrafterSpec, target: TargetConfig) -> dict[str, Any]:
    """The fields of `DrafterConfig` for a recipe and a target, for every architecture's `resolve`.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE, layers that the target does not have; SPEC_INVALID, no mask token.
    """
    return {
        "target_model_type": target.model_type,
        "num_target_layers": target.num_layers,
        "target_layer_ids": tuple(sorted(target_layers(spec, target.num_layers))),
        "vocab_size": target.vocab_size,
        "mask_token_id": resolve_mask_token_id(spec, target),
        "embedding_scale": target.embedding_scale,
        "logit_soft_cap": target.logit_soft_cap,
        "block_size": spec.block_size,
        "hidden_size": target.hidden_size,
        "rms_norm_eps": target.rms_norm_eps,
    }


def _config_invalid(message: str) -> SlipstreamError:
    return SlipstreamError(
        message,
        reason=Reason.CHECKPOINT_INVALID,
        remedy="Use a checkpoint that this version wrote, or start a new run.",
    )
