"""Drafters of any format as ours: for evaluation, and for the first weights of a run."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter_trainer.checkpoint import load_drafter_weights
from drafter_trainer.checkpoint_state import MANIFEST
from drafter_trainer.drafter import DFlashDrafter
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.evaluation.prompt_decoder import end_ids
from drafter_trainer.formats.drafter_format import PublishedDrafter
from drafter_trainer.formats.provenance import read_provenance
from drafter_trainer.formats.published import read_published
from drafter_trainer.formats.published_config import PublishedConfig
from drafter_trainer.formats.self_test import SelfTest, TargetReader, compare_forward, run_self_test
from drafter_trainer.formats.tensors import check_tensors
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_facts import read_frozen_weights, read_target_facts
from slipstream.target_loading import load_causal_lm
from slipstream.telemetry.logs import log_event

_log = logging.getLogger(__name__)

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


def open_with_target(directory: Path, target: TargetSpec, device: str) -> tuple[PublishedDrafter, SelfTest]:
    """Read a drafter and decode with it.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, TARGET_INCOMPATIBLE, MODEL_INVALID, OUT_OF_MEMORY.
    """
    read_provenance(directory)
    drafter = read_published(directory)
    loaded = load_causal_lm(target, device)
    facts = read_target_facts(loaded.model, loaded.tokenizer).config
    config = drafter.config.for_target(facts)
    check_copies(drafter, read_frozen_weights(loaded.model, facts))
    reader = TargetReader(loaded, facts.embedding_scale, end_ids(loaded))
    return drafter, run_self_test(reader, as_module(config, drafter.weights), directory)


def read_first_weights(directory: Path, config: DrafterConfig, tables: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights for step 0 of a run, float32 on the CPU: of a checkpoint, or of a drafter in any of the formats.

    Args:
        directory: `drafter.init_from`.
        config: of the run; the drafter must be the same in everything.
        tables: the target's `embed_tokens.weight` and `lm_head.weight`, with which copies must agree.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID; TARGET_INCOMPATIBLE, a drafter for another target; SPEC_INVALID, one of
            other sizes, naming what was found and expected.
    """
    if not directory.is_dir():
        raise SlipstreamError(
            f"drafter.init_from is {directory}, which is no directory on this machine",
            reason=Reason.CHECKPOINT_INVALID,
            remedy="Give the trainer's path of a checkpoint, or of a drafter in one of the formats.",
        )
    if (directory / MANIFEST).exists():
        text, weights = load_drafter_weights(directory)
        found = DrafterConfig.from_json(text)
        check_same_drafter(PublishedConfig.of(found), config, directory)
        check_tensors(weights, PublishedConfig.of(found), (), str(directory))
        source = "checkpoint"
    else:
        read_provenance(directory)
        drafter = read_published(directory)
        check_same_drafter(drafter.config, config, directory)
        check_copies(drafter, tables)
        weights, source = drafter.weights, drafter.format_name
        compare_forward(directory, as_module(config, weights))
    log_event(_log, "info", "first_weights", directory=str(directory), format=source)
    return {name: weight.float() for name, weight in weights.items()}


def check_same_drafter(found: PublishedConfig, config: DrafterConfig, directory: Path) -> None:
    """Refuse a drafter that is not the one that the run trains.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE, SPEC_INVALID.
    """
    wanted = PublishedConfig.of(config)
    if found.num_target_layers is None:
        found = dataclasses.replace(found, num_target_layers=wanted.num_target_layers)
    pairs = {name: (value, getattr(wanted, name)) for name, value in vars(found).items()}
    wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name != "max_position_embeddings"}
    if not wrong:
        return
    listed = "; ".join(f"{name} {_shown(one)} (expected {_shown(other)})" for name, (one, other) in wrong.items())
    of_target = {"vocab_size", "hidden_size", "num_target_layers"} & wrong.keys()
    settings = [f"{name} = {_shown(wrong[name][0])}" for name in _SETTINGS if name in wrong]
    raise SlipstreamError(
        f"the drafter in {directory} is {'for another target' if of_target else 'another one than the run trains'}: "
        f"{listed}",
        reason=Reason.TARGET_INCOMPATIBLE if of_target else Reason.SPEC_INVALID,
        remedy="Train it with the target it belongs to."
        if of_target or not settings
        else f"Set in [drafter]: {', '.join(settings)}.",
    )


def check_copies(drafter: PublishedDrafter, tables: dict[str, Tensor]) -> None:
    """Refuse a drafter with an embedding or head of its own: the target's are used in training and decoding.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE.
    """
    for name, copy in drafter.target_copies.items():
        table = tables.get(name, tables["embed_tokens.weight"]).cpu()
        narrow = copy.dtype if copy.itemsize <= table.itemsize else table.dtype
        if not torch.equal(copy.to(narrow), table.to(narrow)):
            difference = (copy.float() - table.float()).abs().max().item()
            raise SlipstreamError(
                f"the drafter brings a {name} of its own: it differs from the target's by up to {difference:.3g}, "
                "expected the same",
                reason=Reason.TARGET_INCOMPATIBLE,
                remedy="Give the target that the drafter was trained for.",
            )


def as_module(config: DrafterConfig, weights: dict[str, Tensor]) -> DFlashDrafter:
    """The drafter, float32, on the CPU."""
    drafter = DFlashDrafter(config)
    drafter.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return drafter


def recipe_settings(config: PublishedConfig) -> dict[str, Any]:
    """What `[drafter]` must say to train on from this drafter."""
    values = {name: getattr(config, name) for name in _SETTINGS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
            if value is not None}  # fmt: skip


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
