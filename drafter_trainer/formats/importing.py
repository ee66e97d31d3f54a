"""Reads a drafter of any format and decodes with it."""

import logging
from pathlib import Path

from drafter_trainer.formats.drafter_format import PublishedDrafter
from drafter_trainer.formats.first_weights import TrainedTarget, check_fingerprint
from drafter_trainer.formats.module import as_module, check_copies
from drafter_trainer.formats.provenance import Provenance, read_provenance
from drafter_trainer.formats.published import read_published
from drafter_trainer.formats.self_test import SelfTest, TargetReader, run_self_test
from slipstream.eval_prompts import end_ids
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_facts import read_frozen_weights, read_target_facts
from slipstream.target_files import locate_target
from slipstream.target_fingerprint import fingerprint_target
from slipstream.target_loading import load_causal_lm
from slipstream.telemetry.logs import log_event

_log = logging.getLogger(__name__)


def open_with_target(directory: Path, target: TargetSpec, device: str) -> tuple[PublishedDrafter, SelfTest]:
    """Read a drafter and decode with it.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, TARGET_INCOMPATIBLE, MODEL_INVALID, OUT_OF_MEMORY.
    """
    made_from = read_provenance(directory)
    drafter = read_published(directory)
    if made_from is not None:
        _check_target(made_from, target, directory)
    log_event(_log, "info", "loading_target", model=target.model, device=device)
    loaded = load_causal_lm(target, device)
    facts = read_target_facts(loaded.model, loaded.tokenizer).config
    config = drafter.config.for_target(facts)
    check_copies(drafter, read_frozen_weights(loaded.model, facts))
    reader = TargetReader(loaded, facts.embedding_scale, end_ids(loaded))
    return drafter, run_self_test(reader, as_module(config, drafter.weights), directory)


def _check_target(made_from: Provenance, target: TargetSpec, directory: Path) -> None:
    """Before it is loaded: two models of equal sizes differ in their files.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE; MODEL_INVALID, there is none.
    """
    dtype = str(made_from.spec.get("target", {}).get("dtype"))
    found = TrainedTarget(fingerprint_target(locate_target(target), dtype), dtype, {})
    check_fingerprint(made_from.target_fingerprint, made_from.spec, found, directory)
