"""What a heartbeat says of an assignment: state, metrics, log lines, events, checkpoints, each until it was heard."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from drafter_trainer.agent.assignment import Assignment
from drafter_trainer.agent.restarts import Failure
from drafter_trainer.agent.run_files import RunFiles

ENDING = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
"""States with which a trainer gives up its assignment."""
_MAX_EVENTS = 100
_LONGEST_TEXT = 4000


@dataclass(frozen=True)
class Standing:
    """How the work on an assignment stands."""

    state: str
    total_steps: int | None = None
    target_unreachable: bool = False
    transport: str | None = None
    """How packs come to the process; None while it has not said it."""
    data: Mapping[str, Any] | None = None
    """What was found in the run's data; None while it has not said it."""
    exit: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Sent:
    """What the newest report held; it counts once it was answered."""

    state: str = "STARTING"
    num_events: int = 0
    checkpoints: list[dict[str, Any]] | None = None
    is_whole: bool = True
    """Metrics and log up to their ends."""
    metrics_end: int = 0
    data: Mapping[str, Any] | None = None


class Reporter:
    """Builds the reports of one assignment."""

    def __init__(self, assignment: Assignment, files: RunFiles) -> None:
        self._assignment = assignment
        self._files = files
        self._next_metric = assignment.next_metric_index
        self._next_line = assignment.next_log_line
        self._events: list[dict[str, Any]] = []
        self._known_checkpoints: list[dict[str, Any]] | None = None
        self._known_data: Mapping[str, Any] | None = None
        self._sent = _Sent()
        self.heard_state: str | None = None
        """The state in the newest report that was answered."""
        self.has_more = False
        """There is more to send than the last report could hold."""
        self.all_is_said = False
        """The end of the work, and everything up to it, has been heard; or nobody asks for it any more."""

    def add_event(self, kind: str, message: str, data: Mapping[str, Any]) -> None:
        """Something has happened."""
        event = {
            "id": uuid.uuid4().hex,
            "type": kind,
            "message": as_text(message),
            "time": datetime.now(UTC).isoformat(),
            "data": dict(data),
        }
        self._events.append(event)

    def build(self, standing: Standing) -> dict[str, Any]:
        """The report to send now.

        A state that ends the assignment is held back until everything before it fits into the report.
        """
        metrics = self._files.metrics(self._next_metric)
        report: dict[str, Any] = {
            "assignment": self._assignment.id,
            "run_uid": self._assignment.run_uid,
            "target_unreachable": standing.target_unreachable,
            "transport": standing.transport,
            "data": standing.data if standing.data != self._known_data else None,
            "events": self._events[:_MAX_EVENTS],
            "checkpoints": None,
            "exit": standing.exit,
        }
        if metrics.records:
            report["metrics"] = {"first_index": metrics.first, "records": metrics.records}
        log = self._files.log_lines(self._next_line)
        if log.lines:
            report["logs"] = {"first_line": log.first, "lines": log.lines}
        is_whole = metrics.reach_end and log.reach_end and len(self._events) <= _MAX_EVENTS
        step = self._files.steps_trained()
        if step is not None:
            report["progress"] = {"step": step, "total_steps": standing.total_steps}
        checkpoints = self._files.checkpoints()
        if checkpoints != self._known_checkpoints:
            report["checkpoints"] = checkpoints
        report["state"] = standing.state if is_whole or standing.state not in ENDING else self._sent.state
        self._sent = _Sent(
            report["state"],
            len(report["events"]),
            checkpoints,
            is_whole,
            metrics.first + len(metrics.records),
            standing.data,
        )
        return report

    def answered(self, acknowledged: Mapping[str, Any] | None) -> None:
        """The newest report was answered; None: the control API does not know the run any more."""
        if acknowledged is None:
            self.all_is_said, self.has_more = True, False
            return
        self.heard_state = self._sent.state
        del self._events[: self._sent.num_events]
        self._known_checkpoints = self._sent.checkpoints
        self._known_data = self._sent.data
        self._next_metric = acknowledged["next_metric_index"]
        self._next_line = acknowledged["next_log_line"]
        missing = self._next_metric < self._sent.metrics_end
        self.has_more = not self._sent.is_whole or missing
        self.all_is_said = self._sent.state in ENDING and not missing


def exit_report(failure: Failure, *, child: int, log_tail: list[str], will_restart: bool) -> dict[str, Any]:
    """The part `exit` of a report."""
    return {
        "child": child,
        "exit_code": failure.exit_code,
        "reason": failure.reason.value,
        "message": as_text(failure.message),
        "remedy": as_text(failure.remedy),
        "log_tail": log_tail,
        "will_restart": will_restart,
    }


def as_text(text: str) -> str:
    """Text that the control API takes: no half characters, no zero bytes, not too long."""
    return text.encode(errors="replace").decode().replace("\0", "")[:_LONGEST_TEXT]
