"""The drafter that a run begins with, where its definition names one: any of the formats, or a checkpoint."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from drafter_trainer.checkpoint import load_drafter_weights
from drafter_trainer.checkpoint_state import read_state
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.formats.module import as_module, check_copies, require_dflash
from drafter_trainer.formats.provenance import PROVENANCE, read_provenance
from drafter_trainer.formats.published import read_published
from drafter_trainer.formats.published_config import PublishedConfig
from drafter_trainer.formats.self_test import compare_forward
from drafter_trainer.formats.tensors import check_parameters
from slipstream.checkpoint_name import MANIFEST
from slipstream.errors import SlipstreamError
from slipstream.run_spec.architectures import DFLASH
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event

_log = logging.getLogger(__name__)

# Of the target alone (a factor is rounded to its dtype), or of no consequence.
_MAY_DIFFER = ("target_model_type", "embedding_scale", "logit_soft_cap", "max_position_embeddings")
# Settings of `[drafter]` by the field of the configuration that they decide.
_SETTINGS = (
    "num_layers",
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "layer_types",
    "sliding_window",
)


@dataclass(frozen=True)
class TrainedTarget:
    """The target of the run that begins."""

    fingerprint: str
    dtype: str
    """Part of the fingerprint: only fingerprints taken in the same dtype compare."""
    tables: dict[str, Tensor]
    """`embed_tokens.weight` and `lm_head.weight`, [V, D]."""


def read_first_weights(
    directory: Path, config: DrafterConfig, target: TrainedTarget, *, event: str = "first_weights"
) -> dict[str, Tensor]:
    """Weights for step 0 of a run, float32 on the CPU.

    Args:
        directory: a checkpoint, or a drafter in any of the formats.
        config: of the run; the drafter must be the same in everything.
        target: of the run.
        event: what the log calls it.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID; TARGET_INCOMPATIBLE, a drafter for another target; SPEC_INVALID, one of
            other sizes, naming what was found and expected.
    """
    is_checkpoint = (directory / MANIFEST).exists()
    weights = (_of_checkpoint if is_checkpoint else _of_published)(directory, config, target)
    log_event(_log, "info", event, directory=str(directory))
    return {name: weight.float() for name, weight in weights.items()}


def _of_checkpoint(directory: Path, config: DrafterConfig, target: TrainedTarget) -> dict[str, Tensor]:
    text, weights = load_drafter_weights(directory)
    found = DrafterConfig.from_json(text)
    check_same_drafter({"architecture": found.architecture, **vars(found)}, config, directory)
    state = read_state(directory)
    check_fingerprint(state.target_fingerprint, state.spec, target, directory)
    check_parameters(weights, config, str(directory))
    return weights


def _of_published(directory: Path, config: DrafterConfig, target: TrainedTarget) -> dict[str, Tensor]:
    made_from = read_provenance(directory)
    drafter = read_published(directory)
    stated = {name: value for name, value in vars(drafter.config).items() if value is not None}
    check_same_drafter({"architecture": DFLASH, "sliding_window": None, **stated}, config, directory)
    if made_from is not None:
        check_fingerprint(made_from.target_fingerprint, made_from.spec, target, directory)
    check_copies(drafter, target.tables)
    compare_forward(directory, as_module(require_dflash(config, str(directory)), drafter.weights))
    return drafter.weights


def check_fingerprint(found: str, spec: dict[str, Any], target: TrainedTarget, directory: Path) -> None:
    """Two models of equal sizes differ in it.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE.
    """
    if spec.get("target", {}).get("dtype") == target.dtype and found != target.fingerprint:
        raise SlipstreamError(
            f"the drafter in {directory} was trained for another target: fingerprint {found[:16]}, expected "
            f"{target.fingerprint[:16]}",
            reason=Reason.TARGET_INCOMPATIBLE,
            remedy=f"If the new target is meant: export the drafter and remove {PROVENANCE} from the copy.",
        )


def check_same_drafter(found: Mapping[str, Any], config: DrafterConfig, directory: Path) -> None:
    """Refuse a drafter that is not the one that the run trains.

    Args:
        found: its architecture and all fields of the configuration that its files state.
        config: of the run.
        directory: for the words.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE, SPEC_INVALID.
    """
    wanted = {"architecture": config.architecture, **vars(config)}
    compared = [name for name in wanted if name in found and name not in _MAY_DIFFER]
    wrong = {name: (found[name], wanted[name]) for name in compared if found[name] != wanted[name]}
    if "architecture" in wrong:
        # What else differs follows from it.
        wrong = {"architecture": wrong["architecture"]}
    if not wrong:
        return
    listed = "; ".join(f"{name} {_shown(one)} (expected {_shown(other)})" for name, (one, other) in wrong.items())
    of_target = {"vocab_size", "hidden_size", "num_target_layers"} & wrong.keys()
    settings = [f"{name} = {_in_toml(wrong[name][0])}" for name in ("architecture", *_SETTINGS) if name in wrong]
    raise SlipstreamError(
        f"the drafter in {directory} is {'for another target' if of_target else 'another one than the run trains'}: "
        f"{listed}",
        reason=Reason.TARGET_INCOMPATIBLE if of_target else Reason.SPEC_INVALID,
        remedy="Train it with the target it belongs to."
        if of_target or not settings
        else f"Set in [drafter]: {', '.join(settings)}.",
    )


def recipe_settings(config: PublishedConfig) -> dict[str, Any]:
    """What `[drafter]` must say to train on from this drafter."""
    values = {name: getattr(config, name) for name in _SETTINGS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
            if value is not None}  # fmt: skip


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _in_toml(value: Any) -> str:
    return json.dumps(_shown(value))
