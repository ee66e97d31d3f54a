"""The weights that a process begins with: of the newest checkpoint, of a given drafter, or drawn from the seed."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafter_trainer.checkpoint import load_checkpoint
from drafter_trainer.checkpoint_state import CheckpointState, newest_checkpoint, read_state
from drafter_trainer.first_drafter_record import FirstDrafter
from drafter_trainer.formats.tensors import check_parameters
from drafter_trainer.resume import check_same_run, restore_rng_state
from drafter_trainer.run_directory import RunDirectory
from drafter_trainer.step import TrainingStep
from slipstream.run_spec.spec import RunSpec
from slipstream.telemetry.logs import log_event

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedState:
    """The checkpoint that weights came from."""

    directory: Path
    state: CheckpointState


def find_saved_state(run: RunDirectory, spec: RunSpec, *, resume: bool) -> CheckpointState | None:
    """What the newest checkpoint says of the run, before anything costly begins; None for a new run.

    Raises:
        SlipstreamError: the directory is used and must not be (SPEC_INVALID), holds another run (SPEC_INVALID), or its
            newest checkpoint is damaged (CHECKPOINT_INVALID).
    """
    if not resume:
        run.require_unused()
    with run.unchanged():
        directory = newest_checkpoint(run.checkpoints)
        state = read_state(directory) if directory else None
    if state is not None:
        check_same_run(state, spec, where=str(directory))
    return state


def load_weights(
    step: TrainingStep, run: RunDirectory, spec: RunSpec, target_fingerprint: str, first: FirstDrafter | None = None
) -> SavedState | None:
    """Fill weights, optimizer and generators in place; returns the checkpoint they came from, if any.

    The checkpoint is looked for again: while this process warmed up, a trainer that still runs has saved newer ones.
    Without one, `first` is what `drafter.init_from` names; None: it names nothing.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID.
    """
    with run.unchanged():
        directory = newest_checkpoint(run.checkpoints)
        checkpoint = load_checkpoint(directory) if directory else None
    if directory is None or checkpoint is None:
        step.load_weights(first_weights(step, spec, target_fingerprint, first))
        torch.manual_seed(spec.train.seed)
        return None
    check_same_run(checkpoint.state, spec, where=str(directory))
    check_parameters(checkpoint.drafter, step.drafter.config, str(directory), must_be_finite=False)
    step.load_weights(checkpoint.drafter)
    step.optimizer.load_state(checkpoint.optimizer)
    restore_rng_state(checkpoint.rng)
    log_event(_log, "info", "resumed", run=spec.name, next_step=checkpoint.state.cursor.next_step)
    return SavedState(directory, checkpoint.state)


def check_first_drafter(step: TrainingStep, spec: RunSpec, target_fingerprint: str, first: FirstDrafter | None) -> None:
    """Refuse one that cannot be the beginning before minutes are spent on compiling; it is read again afterwards.

    Raises:
        SlipstreamError: as of `first_weights`.
    """
    if first is not None:
        first_weights(step, spec, target_fingerprint, first, event="first_drafter_fits")


def first_weights(
    step: TrainingStep,
    spec: RunSpec,
    target_fingerprint: str,
    first: FirstDrafter | None,
    *,
    event: str = "first_weights",
) -> dict[str, Tensor]:
    """What step 0 begins with, float32 on the CPU: drawn from the seed, or those of `drafter.init_from`.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, TARGET_INCOMPATIBLE, SPEC_INVALID: that drafter cannot be the beginning.
    """
    if first is None:
        return step.first_weights(spec.train.seed)
    # Here, because it loads transformers, which training has no use for.
    from drafter_trainer.formats.first_weights import TrainedTarget, read_first_weights

    tables = {"embed_tokens.weight": step.frozen.embedding, "lm_head.weight": step.frozen.head}
    target = TrainedTarget(target_fingerprint, spec.target.dtype, tables)
    return read_first_weights(first.find(), step.drafter.config, target, event=event)
