"""The training loop: take a step's packs, launch the step, settle the one before, save when it is time."""

import dataclasses
import logging
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafter_trainer.batch_source import BatchSource
from drafter_trainer.checkpoint import Checkpoint
from drafter_trainer.checkpoint_state import CheckpointState, Cursor, HeldoutEstimate, LoopState
from drafter_trainer.checkpoint_writer import CheckpointWriter
from drafter_trainer.cost_report import CostReport, costs_json, log_costs
from drafter_trainer.device_failures import Phase, failures_reported
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.heldout import HeldoutEvaluation, HeldoutResult
from drafter_trainer.metrics import MetricsFile
from drafter_trainer.progress import Progress
from drafter_trainer.resume import rng_state, versions
from drafter_trainer.run_directory import RunDirectory
from drafter_trainer.schedule import learning_rate
from drafter_trainer.step import PendingStep, StepNumbers, TrainingStep
from drafter_trainer.step_report import StepReporter, Waits
from drafter_trainer.target_link import TargetLink
from drafter_trainer.training_packs import StepBatch
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from slipstream.telemetry.logs import log_event
from slipstream.wire.channel import WaitInterruptedError

_NOTHING_SAVED = -1
_MOST_NAMED = 8
"""Packs, in a message."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunParts:
    """What a run is made of."""

    spec: RunSpec
    config: DrafterConfig
    step: TrainingStep
    source: BatchSource
    link: TargetLink
    directory: RunDirectory
    metrics: MetricsFile
    progress: Progress
    reporter: StepReporter
    costs: CostReport
    writer: CheckpointWriter
    heldout: HeldoutEvaluation | None = None
    """None where the recipe names no held-out answers."""


@dataclass
class Standing:
    """How far the run is; what is settled here is what a checkpoint holds."""

    next_step: int
    total_steps: int
    loop: LoopState = field(default_factory=LoopState)
    last_checkpoint: Path | None = None
    """The one that the run was resumed from, then the newest that it saved."""


class TrainingLoop:
    """One process's share of a run, from where it stands to the end, or until it is told to stop."""

    def __init__(self, parts: RunParts, standing: Standing) -> None:
        self._parts = parts
        self.standing = standing
        self._launched: deque[PendingStep] = deque()
        # While a GPU computes one step, the host prepares the next. A CPU computes in `run` itself.
        self._steps_in_flight = 1 if parts.step.device.type == "cuda" else 0
        self._saved_step = standing.next_step
        self._measured: tuple[int, HeldoutResult | None] = (standing.next_step, None)
        """Steps trained by then, and what was found."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._bad_packs: tuple[int, ...] = ()
        """Packs of the last step that was not applied."""

    def run(self) -> None:
        """Train.

        Raises:
            SlipstreamError: INCARNATION_STALE, DISK_FULL, LOSS_NOT_FINITE, OUT_OF_MEMORY, or what ended the feeder.
        """
        try:
            self._train()
        except SlipstreamError as error:
            if error.reason is Reason.DISK_FULL and self._has_blown_up:
                # That came first: with more room on the disk, the run would end all the same.
                raise self._not_finite(f" The disk is full, too. {error.message}") from error
            raise

    def _train(self) -> None:
        self._measure_again()
        self._parts.reporter.begin()
        while (batch := self._next_batch()) is not None:
            self._launch(batch)
            # Its own weights are measured: nothing is launched behind it before.
            self._settle(leave=0 if self._is_measured_after(batch.step) else self._steps_in_flight)
            if self._is_saved_after(batch.step):
                self._save()
            self._note_saved()
        self._save()
        self._note_saved(wait=True)
        self._report_costs()

    def _report_costs(self) -> None:
        """What was predicted of the run, beside what was measured. All that counts is saved: no run fails for it."""
        pack_bytes, checkpoint = self._parts.source.pack_bytes, self.standing.last_checkpoint
        costs = self._parts.costs.compared(pack_bytes=pack_bytes, checkpoint=checkpoint)
        if not costs:
            return
        log_costs(costs)
        try:
            with self._parts.link.incarnation_held() as incarnation:
                self._parts.directory.write_report("costs.json", costs_json(costs), incarnation)
        except SlipstreamError as refused:
            log_event(_log, "info", "costs_not_kept", detail=refused.message)

    def _is_saved_after(self, step: int) -> bool:
        """Whether a checkpoint is due, however the run goes on."""
        return (step + 1) % self._parts.spec.checkpoint.every_steps == 0

    def _is_measured_after(self, step: int) -> bool:
        """Whether held-out acceptance is due: by the recipe alone, so that a resumed run does the same."""
        if self._parts.heldout is None:
            return False
        every = self._parts.spec.eval.every_steps
        is_due = self._is_saved_after(step) if every is None else (step + 1) % every == 0
        return is_due or step + 1 == self.standing.total_steps

    def _next_batch(self) -> StepBatch | None:
        if not self._parts.source.is_ready():
            # Nothing to launch for now: the step that runs is the news to tell.
            self._settle()
        launched = self.standing.next_step + len(self._launched)
        if launched >= self.standing.total_steps:
            return None
        with failures_reported(Phase.PACKS, self._shapes):
            return self._parts.source.next_batch()

    def _launch(self, batch: StepBatch) -> None:
        rate = learning_rate(self._parts.spec.optimizer, batch.step, self.standing.total_steps)
        if not batch.packs:
            self._settle()
            self._conclude(batch.step, (), None, rate)
            return
        self._shapes = {name: tuple(tensor.shape) for name, tensor in batch.packs[0].tensors.items()}
        with failures_reported(Phase.STEP, self._shapes):
            self._launched.append(self._parts.step.run(batch, rate))

    def _settle(self, leave: int = 0) -> None:
        """Conclude launched steps, oldest first, until `leave` are left."""
        while len(self._launched) > leave:
            pending = self._launched.popleft()
            with failures_reported(Phase.RESULT, self._shapes):
                numbers = pending.wait()
            self._conclude(pending.step, pending.sequence_numbers, numbers, pending.learning_rate)

    def _conclude(self, step: int, sequence_numbers: tuple[int, ...], numbers: StepNumbers | None, rate: float) -> None:
        """Commit, count and record a step. In this order: a newer trainer's claim stops us before we write."""
        self._commit(step)
        self._count(step, numbers)
        measured = self._measure(step)
        with self._parts.link.incarnation_held() as incarnation, self._parts.directory.owned(incarnation):
            record = self._parts.reporter.record(
                step,
                sequence_numbers,
                numbers,
                learning_rate=rate,
                waits=Waits(self._parts.source.waited_seconds, self._parts.writer.blocked_seconds),
                incarnation=incarnation,
            )
            if measured is not None:
                record = dataclasses.replace(record, **measured.record_fields())
            self._parts.metrics.append(record)
        self._parts.costs.count(record)
        self._parts.progress.show(record)
        self._stop_if_not_finite()

    def _measure(self, step: int) -> HeldoutResult | None:
        """Held-out acceptance after this step, where it is due; None also when the run is told to stop meanwhile."""
        heldout = self._parts.heldout
        if heldout is None or not self._is_measured_after(step):
            return None
        assert not self._launched, "the weights of a later step would be measured"
        with failures_reported(Phase.HELDOUT):
            measured = heldout.measure(self._parts.step)
        self._measured = (step + 1, measured)
        if measured is None:
            why = "the run was told to stop; the next start measures it first"
            log_event(_log, "info", "heldout_not_measured", step=step + 1, because=why)
        else:
            log_event(_log, "info", "heldout_measured", step=step + 1, **measured.log_fields())
        return measured

    def _measure_again(self) -> None:
        """What the process before was about to measure when it was told to stop: its last record is written anew, and
        so is the checkpoint of a step that is saved, so that it can be the best."""
        record, step = self._unmeasured(), self.standing.next_step - 1
        measured = None if record is None else self._measure(step)
        if record is None or measured is None:
            return
        found = {**measured.record_fields(), "seconds": record["seconds"] + measured.seconds}
        with self._parts.link.incarnation_held() as incarnation, self._parts.directory.owned(incarnation):
            self._parts.metrics.append_fields(record | found)
        if self._is_saved_after(step) or step + 1 == self.standing.total_steps:
            self._saved_step = _NOTHING_SAVED
            self._save()

    def _unmeasured(self) -> dict[str, Any] | None:
        """The record of the newest step, where that is to be measured and was not."""
        step = self.standing.next_step - 1
        record = self._parts.metrics.newest() if step >= 0 and self._is_measured_after(step) else None
        if record is None or record["step"] != step or record.get("heldout_accepted_length") is not None:
            return None
        return record

    @property
    def is_finished(self) -> bool:
        """Every step is trained, and the last one measured where the recipe says so. Else the run can be resumed."""
        return self.standing.next_step == self.standing.total_steps and self._unmeasured() is None

    def _commit(self, step: int) -> None:
        try:
            self._parts.link.commit(step)
        except WaitInterruptedError:
            # Told to stop while the target is away. The checkpoint holds the step; the next seek tells the server.
            log_event(_log, "info", "step_not_committed", step=step)

    def _count(self, step: int, numbers: StepNumbers | None) -> None:
        loop, train = self.standing.loop, self._parts.spec.train
        failed = numbers is not None and not numbers.applied
        if numbers is not None and failed:
            self._bad_packs = numbers.not_finite
            log_event(
                _log,
                "warning",
                "step_not_applied",
                step=step,
                loss=numbers.acceptance.loss,
                gradient_norm=numbers.gradient_norm,
                packs=numbers.not_finite,
                in_row=loop.not_finite_in_row + 1,
            )
        self.standing.loop = LoopState(
            tokens=loop.tokens + train.packs_per_step * self._parts.spec.data.pack_tokens,
            not_finite_steps=loop.not_finite_steps + failed,
            not_finite_in_row=loop.not_finite_in_row + 1 if failed else 0,
        )
        self.standing.next_step = step + 1

    def _stop_if_not_finite(self) -> None:
        if self._has_blown_up:
            self._note_saved(wait=True)
            raise self._not_finite()

    @property
    def _has_blown_up(self) -> bool:
        return self.standing.loop.not_finite_in_row >= self._parts.spec.train.max_not_finite_steps

    def _not_finite(self, besides: str = "") -> SlipstreamError:
        packs = ", ".join(map(str, self._bad_packs[:_MOST_NAMED])) + (
            ", …" if len(self._bad_packs) > _MOST_NAMED else ""
        )
        return SlipstreamError(
            f"Loss or gradient was not finite in {self.standing.loop.not_finite_in_row} steps in a row, up to step "
            f"{self.standing.next_step - 1} (packs {packs}); none of them was applied.{besides}",
            reason=Reason.LOSS_NOT_FINITE,
            remedy=f"The last good checkpoint is kept: {self.standing.last_checkpoint or 'none yet'}. Lower "
            "optimizer.learning_rate, look at the packs that step_not_applied names in the log, or train in float32.",
        )

    def _save(self) -> None:
        self._settle()
        standing = self.standing
        if standing.next_step == self._saved_step:
            return
        with failures_reported(Phase.SAVE), self._parts.link.incarnation_held() as incarnation:
            state = CheckpointState(
                run=self._parts.spec.name,
                incarnation=incarnation,
                cursor=Cursor(
                    next_step=standing.next_step,
                    first_sequence_number=self._parts.link.first_sequence_number,
                    quarantined=tuple(sorted(self._parts.link.quarantined)),
                ),
                loop=standing.loop,
                total_steps=standing.total_steps,
                target_fingerprint=self._parts.link.fingerprint,
                stream=self._parts.link.stream,
                spec=self._parts.spec.model_dump(mode="json"),
                versions=versions(),
                heldout=self._estimate(),
            )
            checkpoint = Checkpoint(
                state=state,
                drafter_config=self._parts.config.to_json(),
                drafter=self._parts.step.optimizer.deployed_weights(),
                optimizer=self._parts.step.optimizer.state_tensors(),
                rng=rng_state(),
            )
        # Without the incarnation: the save before, which this one waits for, must hold it to end.
        with failures_reported(Phase.SAVE):
            self._parts.writer.save(checkpoint)
        self._saved_step = standing.next_step

    def _estimate(self) -> HeldoutEstimate | None:
        steps, found = self._measured
        return found.estimate() if found is not None and steps == self.standing.next_step else None

    def _note_saved(self, *, wait: bool = False) -> None:
        """Take note of what was saved meanwhile; `wait`: until nothing is left to be saved."""
        with failures_reported(Phase.SAVE):
            if wait:
                self._parts.writer.finish()
            else:
                self._parts.writer.check()
        self.standing.last_checkpoint = self._parts.writer.newest or self.standing.last_checkpoint
