"""One assignment at work: brings its training process to the desired state, and says how it stands."""

import json
import logging
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter_trainer.agent.assignment import Assignment
from drafter_trainer.agent.child import LEAVE_SECONDS, Child, ChildPlan, ChildSlot, append_line
from drafter_trainer.agent.devices import TrainerDevice
from drafter_trainer.agent.reports import Reporter, Standing, exit_report
from drafter_trainer.agent.restarts import RESTARTS, Failure, Restarts, explain
from drafter_trainer.agent.run_files import RunFiles
from drafter_trainer.agent.run_mark import is_of_another_run, mark
from slipstream.disk import disk_errors_in_words, write_atomically
from slipstream.errors import SlipstreamError
from slipstream.run_spec.device import resolve_device
from slipstream.run_spec.load import parse_spec
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.states import DesiredState
from slipstream.telemetry.logs import log_event

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Workplace:
    """What an agent has for any assignment."""

    runs: Path
    """The directory of runs, absolute."""
    slot: ChildSlot
    device: TrainerDevice
    threads: int | None = None
    """CPU threads of a training process; None: torch's choice."""


class Work:
    """Call `advance` whenever something may have changed; `standing` is what the next report says."""

    def __init__(self, assignment: Assignment, place: Workplace) -> None:
        self.assignment = assignment
        """As the control API named it last."""
        self._place = place
        self._directory = place.runs / assignment.directory
        # Nothing that another run has left is reported as this one's.
        is_ours = not is_of_another_run(self._directory, assignment.run_uid)
        self._files = RunFiles(self._directory if is_ours else self._directory / ".none", assignment.attempt)
        self._restarts = Restarts(self._files.newest_checkpoint())
        self._outcome: str | None = None
        self._exit: dict[str, Any] | None = None
        self._total_steps: int | None = None
        self._start_at = 0.0
        self._bytes_before = 0
        self._is_wanted = True
        self._is_leaving = False
        self._is_at_rest = False
        self._target_unreachable = False
        self._transport: str | None = None
        self._data: dict[str, Any] | None = None
        self.child: Child | None = None
        self.reporter = Reporter(assignment, self._files)
        self.is_retired = False
        """Nobody wants this work any more: set it, and the process is stopped for good."""

    @property
    def is_over(self) -> bool:
        """Nothing runs, and all that is to be said was heard."""
        return self.child is None and self.reporter.all_is_said

    @property
    def standing(self) -> Standing:
        """Now."""
        return Standing(
            self._state(), self._total_steps, self._target_unreachable, self._transport, self._data, self._exit
        )

    def _state(self) -> str:
        if self._outcome is not None:
            return self._outcome
        if self.child is not None:
            return "RUNNING" if self._files.end_of_metrics() > self._bytes_before else "STARTING"
        if self._is_wanted or not self._is_at_rest:
            return "STARTING"
        is_kept = self.assignment.desired_state is DesiredState.PAUSED and not self.is_retired and not self._is_leaving
        return "PAUSED" if is_kept else "STOPPED"

    def advance(self, now: float, *, leaving: bool) -> bool:
        """Look at the process; start or stop it as desired. True: something has happened that is worth a heartbeat.

        `leaving`: the agent was told to leave. Seconds count from any moment on, and never jump.
        """
        before = (self.standing, self.child)
        self._is_leaving = leaving
        desired = self.assignment.desired_state is DesiredState.RUNNING
        self._is_wanted = desired and not leaving and not self.is_retired
        if self.child is not None:
            self._look_after(self.child, now)
        if self.child is None and self._outcome is None:
            self._is_at_rest = self._place.slot.is_free(now)
            if self._is_wanted and self._is_at_rest and now >= self._start_at:
                self._start(now)
        return before != (self.standing, self.child)

    def _look_after(self, child: Child, now: float) -> None:
        status = child.poll()
        self._total_steps = child.told.get("total_steps", self._total_steps)
        self._transport = child.told.get("transport", self._transport)
        self._note_data(child.told.get("data"))
        self._target_unreachable = status is None and child.told.get("waits_for_target") is not None
        if status is not None:
            self.child = None
            self._conclude(child, status, now)
        elif child.leave_by is None:
            if not self._is_wanted:
                child.ask_to_leave(now)
                log_event(_log, "info", "child_asked_to_leave", run=self.assignment.run, child=child.number)
        elif now >= child.leave_by:
            log_event(_log, "warning", "child_killed", run=self.assignment.run, pid=child.pid)
            child.is_late = True
            child.kill()

    def _note_data(self, data: dict[str, Any] | None) -> None:
        if data is None or data == self._data:
            return
        self._data = data
        if data["num_dropped"]:
            why = "; ".join(f"{one['count']:,}: {one['words']}" for one in data["dropped"])
            message = f"{data['num_dropped']:,} of {data['read']:,} records gave nothing to learn from. {why}."
            self.reporter.add_event("RECORDS_DROPPED", message, {"num_dropped": data["num_dropped"]})

    def _conclude(self, child: Child, status: int, now: float) -> None:
        end = child.told.get("end")
        with suppress(OSError):  # a full disk; the report says the same
            append_line(self._files.log, f"child {child.number} of this attempt left with status {status}")
        log_event(_log, "info", "child_ended", run=self.assignment.run, child=child.number, status=status, end=end)
        if end == "finished":
            self._outcome = "SUCCEEDED"
        elif child.is_late:
            message = f"The training process did not save and leave within {LEAVE_SECONDS:.0f} s, and was killed."
            self._failed(Failure(Reason.INTERNAL, message, exit_code=status), child.number, now)
        elif child.leave_by is None or not _left_in_order(status, end):
            self._failed(explain(status, child.told, log=str(self._files.log)), child.number, now)

    def _failed(self, failure: Failure, child: int, now: float) -> None:
        delay: float | None = None
        if failure.may_pass and self._is_wanted:
            delay = self._restarts.seconds_before_next(self._files.newest_checkpoint())
            if delay is None:
                message = f"{failure.message} No checkpoint was saved in the last {RESTARTS + 1} starts."
                failure = Failure(failure.reason, message, failure.remedy, failure.exit_code)
        if delay is not None:
            self._start_at = now + delay
        elif self._is_wanted or not failure.may_pass:
            self._outcome = "FAILED"
        # Else nobody wants it to go on: it rests where its last checkpoint is.
        self._exit = exit_report(failure, child=child, log_tail=self._files.log_tail(), will_restart=delay is not None)
        log_event(
            _log, "warning", "child_failed", run=self.assignment.run, reason=failure.reason.value,
            message=failure.message, starts_again_in=delay,
        )  # fmt: skip

    def _start(self, now: float) -> None:
        number = self._place.slot.next_number(self.assignment.id)
        self._bytes_before = self._files.end_of_metrics()
        try:
            self.child = self._place.slot.start(self._plan())
        except SlipstreamError as error:
            self._failed(Failure(error.reason, error.message, error.remedy), number, now)
        except OSError as error:
            self._failed(Failure(Reason.INTERNAL, f"No training process could be started: {error}."), number, now)
        else:
            data = {"child": number, "pid": self.child.pid, "attempt": self.assignment.attempt}
            self.reporter.add_event("CHILD_STARTED", f"Training process {number} of attempt {data['attempt']}.", data)
            log_event(_log, "info", "child_started", run=self.assignment.run, log=str(self._files.log), **data)

    def _plan(self) -> ChildPlan:
        """What the process is started with; everything it needs is in the run's directory.

        Raises:
            SlipstreamError: this trainer cannot train the run.
        """
        directory = self._directory
        mark(directory, self.assignment.run_uid)
        resolve_device(parse_spec(self.assignment.spec).train, self._place.device.is_cuda)
        definition = directory / "definition.json"
        with disk_errors_in_words(directory, flag="--runs"):
            self._files.log.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(definition, json.dumps(self.assignment.spec, indent=2) + "\n")
        arguments = ["run", str(definition), "--target", self.assignment.target, "--run-dir", str(directory)]
        if self._place.threads is not None:
            arguments += ["--threads", str(self._place.threads)]
        return ChildPlan(self.assignment.id, arguments, self._files.log)


def _left_in_order(status: int, end: object) -> bool:
    """Of a process that was asked to: it has saved, or SIGTERM ended it before it had begun."""
    return end == "stopped" or (end is None and status == -signal.SIGTERM)
