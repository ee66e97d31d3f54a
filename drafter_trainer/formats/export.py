"""From a checkpoint to a directory that an engine loads: written whole or not at all, tested by decoding."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafter_trainer.checkpoint import load_drafter_weights
from drafter_trainer.checkpoint_state import CheckpointState, read_state
from drafter_trainer.drafter_config import DFlashConfig, DrafterConfig
from drafter_trainer.evaluation.target_check import check_fits, is_training_target
from drafter_trainer.evaluation.whose_answers import unproven_answers
from drafter_trainer.formats.card_results import evaluation_results, heldout_results
from drafter_trainer.formats.drafter_format import Verifier
from drafter_trainer.formats.model_card import CardFacts, is_gguf, model_card, target_facts
from drafter_trainer.formats.module import as_module, require_dflash
from drafter_trainer.formats.new_directory import new_directory, require_free
from drafter_trainer.formats.provenance import write_provenance
from drafter_trainer.formats.published import FORMATS
from drafter_trainer.formats.published_config import PublishedConfig
from drafter_trainer.formats.run_metrics import seconds_of_steps
from drafter_trainer.formats.self_test import SelfTest, TargetReader, run_self_test
from drafter_trainer.formats.sglang import SglangFormat
from drafter_trainer.formats.tensors import check_tensors
from drafter_trainer.formats.vllm import VllmFormat
from slipstream.disk import disk_errors_in_words, write_atomically
from slipstream.eval_prompts import end_ids
from slipstream.run_spec.spec import RunSpec, TargetSpec
from slipstream.target_facts import read_target_facts
from slipstream.target_files import files_at_hand, is_path, locate_target
from slipstream.target_loading import load_causal_lm
from slipstream.telemetry.logs import log_event

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportPlan:
    """What the command line asks for."""

    checkpoint: Path
    spec: RunSpec
    """In the checkpoint."""
    format_name: str
    output: Path
    dtype: str
    target: TargetSpec | None
    """To decode with; None leaves the self-test out, which the model card then says."""
    served_as: str | None
    """The target's name for those who serve the drafter; None: the run definition's."""
    device: str
    replace: bool
    evaluation: Path | None
    """Report for the model card."""


def export(plan: ExportPlan) -> SelfTest | None:
    """Write, read back, decode, and only then give the directory its name.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, damaged, or the self-test failed; ENVIRONMENT_UNSUPPORTED, the engine
            cannot serve such a drafter; PATH_NOT_ALLOWED, DISK_FULL; TARGET_INCOMPATIBLE; MODEL_INVALID.
    """
    require_free(plan.output, replace=plan.replace)
    state = read_state(plan.checkpoint)
    name = plan.checkpoint.resolve().name
    results = evaluation_results(plan.evaluation, state, name) if plan.evaluation else heldout_results(state)
    text, master = load_drafter_weights(plan.checkpoint)
    config = require_dflash(DrafterConfig.from_json(text), str(plan.checkpoint))
    form, published = FORMATS[plan.format_name], PublishedConfig.of(config)
    # What the engine cannot serve, and weights that are not finite, are refused before a target is loaded.
    form.config_json(published, Verifier("", ()), torch.float32)
    weights = rounded(master, plan.dtype, published, plan.checkpoint)
    reader, verifier = _open_target(plan, state, config)
    with (
        new_directory(plan.output, replace=plan.replace) as directory,
        disk_errors_in_words(plan.output, flag="--output"),
    ):
        log_event(_log, "info", "writing", format=form.name, dtype=plan.dtype)
        form.write(directory, published, weights, verifier)
        form.check(directory, published, weights)
        found = None if reader is None else run_self_test(reader, as_module(config, weights), directory)
        _describe(directory, plan, state, config, (found, results))
    log_event(_log, "info", "exported", directory=str(plan.output), format=form.name, dtype=plan.dtype)
    return found


def rounded(weights: Mapping[str, Tensor], dtype: str, config: PublishedConfig, where: Path) -> dict[str, Tensor]:
    """The weights in another dtype, checked.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, they are not those of `config` or not finite (in that dtype).
    """
    check_tensors(weights, config, (), str(where))
    changed = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    check_tensors(changed, config, (), f"{where} as {dtype}")
    return changed


def _open_target(
    plan: ExportPlan, state: CheckpointState, config: DFlashConfig
) -> tuple[TargetReader | None, Verifier]:
    """The target that decodes, and how it is named to servers.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE, MODEL_INVALID, OUT_OF_MEMORY.
    """
    served_as = plan.served_as or (None if is_gguf(plan.spec.target.model) else plan.spec.target.model)
    if plan.target is None:
        return None, Verifier(served_as, ())
    log_event(_log, "info", "comparing_target", model=plan.target.model)
    is_training_target(plan.target, plan.spec.target, state.target_fingerprint, allow_other=None)
    log_event(_log, "info", "loading_target", model=plan.target.model, device=plan.device)
    loaded = load_causal_lm(plan.target, plan.device)
    facts = read_target_facts(loaded.model, loaded.tokenizer).config
    check_fits(config, facts)
    architectures = tuple(loaded.model.config.architectures or (type(loaded.model).__name__,))
    return TargetReader(loaded, facts.embedding_scale, end_ids(loaded)), Verifier(served_as, architectures)


def _warn_of_the_verifier(model: str) -> None:
    """speculators reads the target's tables from what `verifier.name_or_path` names, and no .gguf."""
    remedy = "--target-name OWNER/NAME"
    if is_gguf(model):
        log_event(_log, "warning", "verifier_is_not_named", target=model, remedy=remedy)
    elif is_path(model):
        log_event(_log, "warning", "verifier_is_a_path_of_this_machine", name_or_path=model, remedy=remedy)


def _warn_of_the_last_layer(config: DFlashConfig) -> None:
    """SGLang takes a layer's output where the next layer begins."""
    if config.target_layer_ids[-1] == config.num_target_layers - 1:
        log_event(
            _log,
            "warning",
            "sglang_does_not_read_the_last_layer",
            target_layer_ids=list(config.target_layer_ids),
            remedy="serve it with vLLM, or train with earlier layers in drafter.target_layer_ids",
        )


def _whose_answers(plan: ExportPlan, state: CheckpointState) -> str | None:
    found = unproven_answers(plan.spec, state.target_fingerprint, plan.target)
    if found is None:
        return "answers of the target itself"
    return None if found["written_by"] is None else f"answers of {found['written_by']}, not of the target"


def _describe(
    directory: Path,
    plan: ExportPlan,
    state: CheckpointState,
    config: DFlashConfig,
    findings: tuple[SelfTest | None, str | None],
) -> None:
    found, results = findings
    run_directory = plan.checkpoint.resolve().parent.parent
    files = locate_target(plan.target) if plan.target else files_at_hand(plan.spec.target)
    # A hub's name says more than the recipe's path of the same files.
    named = plan.target if plan.target and files and files.revision else plan.spec.target
    target = target_facts(plan.served_as, named, files)
    if target.hub_name is None:
        log_event(_log, "info", "card_names_no_base_model", target=target.name, remedy="--target-name OWNER/NAME")
    if plan.format_name == VllmFormat.name and plan.served_as is None:
        _warn_of_the_verifier(plan.spec.target.model)
    if plan.format_name == SglangFormat.name:
        _warn_of_the_last_layer(config)
    facts = CardFacts(
        format_name=plan.format_name,
        dtype=plan.dtype,
        directory_name=plan.output.name,
        target=target,
        steps=state.cursor.next_step,
        total_steps=state.total_steps,
        tokens=state.loop.tokens,
        seconds=seconds_of_steps(run_directory / "metrics.jsonl", state.cursor.next_step),
        versions=state.versions,
        self_test=found,
        results=results,
        answers=_whose_answers(plan, state),
    )
    write_atomically(directory / "README.md", model_card(plan.spec, config, facts))
    write_provenance(
        directory,
        {
            "format": plan.format_name,
            "run": state.run,
            "step": state.cursor.next_step,
            "dtype": plan.dtype,
            "target_fingerprint": state.target_fingerprint,
            "spec": state.spec,
            "self_test": found and found.to_dict(),
        },
    )
