"""What a published drafter says of itself: a DFlashConfig without what only its target knows."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from drafter_trainer.drafter_config import FULL, SLIDING, DFlashConfig
from drafter_trainer.evaluation.target_check import outside_of_target
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import LONGEST_BLOCK
from slipstream.wire.target_config import TargetConfig

# Far above any drafter's: a number that is no size is refused before anything of that size is made.
_MOST = 2**31 - 1
_MOST_LAYERS = 1024


@dataclass(frozen=True)
class PublishedConfig:
    """Sizes of a drafter as its files state them; meanings are DFlashConfig's."""

    target_layer_ids: tuple[int, ...]
    """Zero-based and ascending, whatever numbers the format writes."""
    vocab_size: int
    mask_token_id: int
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
    sliding_window: int | None
    num_target_layers: int | None
    """None where the format does not say it."""

    @classmethod
    def of(cls, config: DFlashConfig) -> "PublishedConfig":
        """The part that travels with the files."""
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(cls)})

    def for_target(self, target: TargetConfig) -> DFlashConfig:
        """The whole configuration, for this target.

        Raises:
            SlipstreamError: TARGET_INCOMPATIBLE, with what was found and expected.
        """
        pairs = {
            "vocabulary rows": (self.vocab_size, target.vocab_size),
            "hidden size": (self.hidden_size, target.hidden_size),
            "target layers": (self.num_target_layers or target.num_layers, target.num_layers),
        }
        wrong = [f"{name} {found} (expected {expected})" for name, (found, expected) in pairs.items()
                 if found != expected]  # fmt: skip
        wrong += outside_of_target(self.target_layer_ids, self.mask_token_id, target)
        if wrong:
            raise SlipstreamError(
                f"the drafter belongs to another target: {', '.join(wrong)}",
                reason=Reason.TARGET_INCOMPATIBLE,
                remedy="Give the target that the drafter was trained for.",
            )
        values = dataclasses.asdict(self) | {"num_target_layers": target.num_layers}
        return DFlashConfig(
            **values,
            target_model_type=target.model_type,
            embedding_scale=target.embedding_scale,
            logit_soft_cap=target.logit_soft_cap,
        )


def qwen3_fields(config: PublishedConfig) -> dict[str, Any]:
    """The draft layers as transformers' Qwen3 configuration; equal in all formats."""
    slides = SLIDING in config.layer_types
    return {
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": list(config.layer_types),
        "use_sliding_window": slides,
        "sliding_window": config.sliding_window,
        # Layers from this one on slide, for readers that do not know layer_types.
        "max_window_layers": config.layer_types.index(SLIDING) if slides else config.num_layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


class ConfigReader:
    """Reads values of a config.json; what is missing, of another type, or not ours to run is refused in words."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        """`where` names the file, and the table in it."""
        self.values, self.where = values, where

    def integer(self, key: str, *, at_least: int = 1, at_most: int = _MOST) -> int:
        """A whole number between the two, which may be either.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID.
        """
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
            most = "on" if at_most == _MOST else f"to {at_most}"
            raise config_invalid(f"{self.where}: {key} is {value!r}, expected a whole number from {at_least} {most}")
        return value

    def block_size(self) -> int:
        """As long as a run's blocks may be.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID.
        """
        return self.integer("block_size", at_least=2, at_most=LONGEST_BLOCK)

    def number(self, key: str) -> float:
        """A positive number; JSON as Python reads it also has Infinity.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID.
        """
        value = self.values.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise config_invalid(f"{self.where}: {key} is {value!r}, expected a positive number")
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of at least one whole number, ascending without repetition.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID.
        """
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(type(one) is int and one >= 0 for one in value):
            raise config_invalid(f"{self.where}: {key} is {value!r}, expected a list of whole numbers")
        if sorted(set(value)) != value:
            raise config_invalid(f"{self.where}: {key} is {value!r}, expected ascending numbers, each once")
        return tuple(value)

    def table(self, key: str) -> "ConfigReader":
        """An inner table.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID.
        """
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise config_invalid(f"{self.where}: {key} is {value!r}, expected a table")
        return ConfigReader(value, f"{self.where}: {key}")

    def require(self, key: str, *allowed: Any) -> None:
        """Refuse another value than these; a key that is not there counts as None.

        Raises:
            SlipstreamError: CHECKPOINT_INVALID.
        """
        value = self.values.get(key)
        if value not in allowed:
            expected = " or ".join("nothing" if one is None else repr(one) for one in allowed)
            raise config_invalid(f"{self.where}: {key} is {value!r}, expected {expected}")


def read_qwen3_fields(reader: ConfigReader) -> dict[str, Any]:
    """The fields of PublishedConfig that the Qwen3 configuration holds.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, a value is missing, or asks for what the drafter does not do.
    """
    reader.require("model_type", "qwen3", None)
    reader.require("hidden_act", "silu", None)
    reader.require("attention_bias", False, None)
    num_layers = reader.integer("num_hidden_layers", at_most=_MOST_LAYERS)
    layer_types, window = _read_layer_types(reader, num_layers)
    hidden_size, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    return {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("num_key_value_heads"),
        "head_dim": reader.integer("head_dim") if reader.values.get("head_dim") else hidden_size // heads,
        "intermediate_size": reader.integer("intermediate_size"),
        "rms_norm_eps": reader.number("rms_norm_eps"),
        "rope_theta": _read_rope_theta(reader),
        "max_position_embeddings": reader.integer("max_position_embeddings"),
        "layer_types": layer_types,
        "sliding_window": window,
    }


def _read_rope_theta(reader: ConfigReader) -> float:
    """From `rope_parameters` (transformers 5) or the older `rope_theta`; scaled rotary positions are refused."""
    scaling = reader.values.get("rope_scaling")
    parameters = reader.values.get("rope_parameters")
    for name, table in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        kind = None if table is None else reader.table(name).values.get("rope_type", table.get("type", "default"))
        if kind not in (None, "default"):
            raise config_invalid(f"{reader.where}: {name} is of type {kind!r}, expected 'default'")
    if parameters is None:
        return reader.number("rope_theta")
    theta = reader.table("rope_parameters").number("rope_theta")
    if reader.values.get("rope_theta") not in (None, theta):
        raise config_invalid(
            f"{reader.where}: rope_theta is {reader.values['rope_theta']!r}, but rope_parameters says {theta!r}"
        )
    return theta


def _read_layer_types(reader: ConfigReader, num_layers: int) -> tuple[tuple[str, ...], int | None]:
    types = reader.values.get("layer_types")
    if types is None:
        reader.require("use_sliding_window", False, None)
        types = [FULL] * num_layers
    if not isinstance(types, list) or len(types) != num_layers or set(types) - {FULL, SLIDING}:
        raise config_invalid(
            f"{reader.where}: layer_types is {types!r}, expected {num_layers} of {FULL!r} and {SLIDING!r}"
        )
    return tuple(types), reader.integer("sliding_window") if SLIDING in types else None


def config_invalid(message: str) -> SlipstreamError:
    """A configuration that cannot be used."""
    return SlipstreamError(
        message,
        reason=Reason.CHECKPOINT_INVALID,
        remedy="Use the config.json that belongs to the weights; other architectures are not supported.",
    )
