"""What trainer agents send and read: registration, heartbeat, assignment. The contract is docs/control-plane.md."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from control_api.data_account import DataAccount
from control_api.field_types import (
    LARGEST,
    Body,
    Count,
    JsonObject,
    Moment,
    Name,
    ReportedTime,
    Resource,
    ShortText,
    Text,
)
from control_api.storable import storable
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.states import DesiredState

TRAINER_PROTOCOL_VERSION = 1
"""Agents of another version are refused when they register."""
MAX_METRICS_PER_HEARTBEAT = 200
MAX_EVENTS_PER_HEARTBEAT = 100
MAX_LOG_LINES_PER_HEARTBEAT = 200
MAX_LOG_LINE = 2000
"""Characters; an agent cuts longer lines, and says so in them."""
MAX_CHECKPOINTS = 1000


CapabilityNumber = Annotated[int, Field(strict=True, ge=0, le=1000)]
"""Major or minor."""


class Device(Body):
    """A device that a trainer may use."""

    kind: Literal["cpu", "cuda"]
    index: Annotated[int, Field(strict=True, ge=0, le=1024)] = 0
    name: Annotated[str, Field(max_length=255)] = ""
    memory_bytes: Count | None = None
    """Null, as below: not known, and nothing is refused or withheld for it."""
    compute_capability: Annotated[list[CapabilityNumber], Field(min_length=2, max_length=2)] | None = None
    """Of a GPU, major and minor: what it can compute."""
    host_memory_bytes: Count | None = None
    """Of the machine that a GPU is in: a run that asks for the CPU trains there."""


class TrainerRegister(Body):
    """A trainer agent says who it is. Sent at its start, and again whenever a heartbeat answers TRAINER_UNKNOWN."""

    name: Name
    instance_id: ShortText
    """Kept in the agent's state directory: an agent that is started again is the same instance; another agent with the
    same name is not, and is refused while the first one is heard of."""
    protocol_version: Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
    host: ShortText
    storage: ShortText
    """Identity of the directory of runs (content of a marker file in it). A run with checkpoints goes only to trainers
    of the storage that holds them."""
    devices: Annotated[list[Device], Field(min_length=1, max_length=64)]
    versions: Annotated[dict[ShortText, ShortText], Field(max_length=32, default_factory=dict)]
    """For people: slipstream, torch, python."""


TrainerStatus = Literal["FREE", "BUSY", "LEAVING", "STOPPED", "LOST"]
"""STOPPED: it was told to leave, and said goodbye. LOST: it fell silent without that."""


class TrainerPublic(Resource):
    """A trainer agent."""

    name: str
    host: str
    storage: str
    status: TrainerStatus
    run: str | None
    assignment: int | None
    devices: list[Device]
    versions: dict[str, str]
    protocol_version: int
    last_seen_at: Moment
    registered_at: Moment


class TrainerAttach(Body):
    """Give a trainer a run."""

    run: Name


ObservedState = Literal["STARTING", "RUNNING", "PAUSED", "STOPPED", "SUCCEEDED", "FAILED"]


class ReportedProgress(Body):
    """How far the child is."""

    step: Count
    """Steps trained, counted from step 0 of the run."""
    total_steps: Annotated[int, Field(strict=True, ge=1, le=LARGEST)] | None = None
    """Once the child knows it."""


class MetricBatch(Body):
    """Consecutive lines of metrics.jsonl."""

    first_index: Count
    """Zero-based line number of the first record."""
    records: Annotated[list[JsonObject], Field(max_length=MAX_METRICS_PER_HEARTBEAT)]
    """The lines, parsed; each has integers `step` and `incarnation`."""

    @model_validator(mode="after")
    def _identified(self) -> Self:
        for position, record in enumerate(self.records):
            for key in ("step", "incarnation"):
                value = record.get(key)
                if type(value) is not int or not 0 <= value <= LARGEST:
                    raise ValueError(f"records.{position}: {key} is {value!r}, expected an integer from 0")
        return self


def _printable(line: Any) -> Any:
    """What no reader can be hurt by: a terminal is not steered, and half a surrogate pair can be stored."""
    if not isinstance(line, str):
        return line
    return line.translate(_CONTROL_PICTURES).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) != "\t"} | {127: 0x2421}
_CONTROL_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)

LogText = Annotated[str, Field(max_length=MAX_LOG_LINE), BeforeValidator(_printable)]


class LogBatch(Body):
    """Consecutive lines of the log file of the attempt."""

    first_line: Annotated[int, Field(strict=True, ge=0, le=LARGEST - MAX_LOG_LINES_PER_HEARTBEAT)]
    """Zero-based line number of the first one. Beyond `next_log_line`: those between are skipped, and stay missing."""
    lines: Annotated[list[LogText], Field(max_length=MAX_LOG_LINES_PER_HEARTBEAT)]
    """Without their line breaks. Control characters are stored as their pictures (ESC as \u241b)."""


class TrainerEvent(Body):
    """Something that happened at the trainer. Sent until a heartbeat was answered; the id makes that harmless."""

    id: ShortText
    type: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")]
    message: Text = ""
    time: ReportedTime
    data: JsonObject = Field(default_factory=dict)


AcceptedLength = Annotated[float, Field(ge=0, le=1e6)]


class ReportedHeldout(Body):
    """What the weights of a checkpoint would be accepted of, by the target's own answers to held-out prompts."""

    accepted_length: AcceptedLength
    """Tokens a round, bonus included, over all sources."""
    by_source: Annotated[dict[str, AcceptedLength], AfterValidator(storable)]


class ReportedCheckpoint(Body):
    """A complete checkpoint on disk."""

    step: Count
    incarnation: Count
    path: ShortText
    saved_at: ReportedTime
    heldout: ReportedHeldout | None = None
    """Null: not measured."""
    is_best: bool = False
    """`best` points to it: no other one on the same answers has a larger accepted length."""


class ChildExit(Body):
    """How a training process of this assignment ended, other than in order."""

    child: Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
    """1 for the first process of the assignment, and so on."""
    exit_code: Annotated[int, Field(strict=True, ge=-255, le=255)] | None = None
    """Negative: the signal that killed it."""
    reason: Reason = Reason.INTERNAL
    message: Text = ""
    remedy: Text = ""
    log_tail: Annotated[list[Text], Field(max_length=100, default_factory=list)]
    will_restart: bool
    """True: the agent starts another child. False goes with state FAILED."""


class AssignmentReport(Body):
    """What a trainer says about the assignment it works on."""

    assignment: Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
    run_uid: ShortText | None = None
    """As it was assigned: the numbers of another database are those of other runs."""
    state: ObservedState
    progress: ReportedProgress | None = None
    target_unreachable: bool = False
    """The child waits for its target, which does not answer, loads, drains or cannot write its ledger."""
    transport: ShortText | None = None
    """How packs come to the child, `shm` or `grpc`; null: it has not said it yet."""
    data: DataAccount | None = None
    """What the target found in the run's data; null: not known yet, or unchanged since a report that was answered."""
    metrics: MetricBatch | None = None
    logs: LogBatch | None = None
    events: Annotated[list[TrainerEvent], Field(max_length=MAX_EVENTS_PER_HEARTBEAT, default_factory=list)]
    checkpoints: Annotated[list[ReportedCheckpoint], Field(max_length=MAX_CHECKPOINTS)] | None = None
    """All complete checkpoints in the run directory; null: unchanged since the last report that was answered."""
    exit: ChildExit | None = None
    """The newest abnormal exit of a child; stays in the reports until the next one."""

    @model_validator(mode="after")
    def _failure_is_explained(self) -> Self:
        if self.state == "FAILED" and (self.exit is None or self.exit.will_restart):
            raise ValueError("state FAILED needs an exit with will_restart = false")
        return self


class HeartbeatReport(Body):
    """Sent every `heartbeat_seconds`."""

    instance_id: ShortText
    leaving: bool = False
    """The agent was told to shut down: it gets no new assignment."""
    report: AssignmentReport | None = None
    """Null while the agent works on nothing."""


class AssignedTarget(Resource):
    """Where the child finds its hidden states."""

    name: str
    address: str


class Assignment(Resource):
    """What a trainer is to work on."""

    id: int
    run: str
    run_uid: str | None
    """Of this run alone; the trainer writes it into the run's directory, and touches none of another run."""
    attempt: int
    """Counts the assignments of the run from 1; names the directory of its logs."""
    desired_state: DesiredState
    directory: str
    """The run's directory below the agent's directory of runs."""
    spec: dict[str, Any]
    """The run definition for the child, complete; its `name` is `directory`."""
    target: AssignedTarget
    next_metric_index: int
    """The line of metrics.jsonl to send next."""
    next_log_line: int
    """The line of the attempt's log file to send next."""


class Acknowledged(Resource):
    """What has been stored of the report."""

    assignment: int
    next_metric_index: int
    """The line of metrics.jsonl to send next; all before it are stored."""
    next_log_line: int
    """The line of the attempt's log file to send next."""


class HeartbeatAnswer(Resource):
    """What the agent is to do. It stops whatever child the answer does not name."""

    assignment: Assignment | None
    acknowledged: Acknowledged | None
    """Of the reported assignment; null when there was no report, or its run is gone."""
    heartbeat_seconds: float


class TrainerList(Resource):
    """A page."""

    trainers: list[TrainerPublic]
    next_page_token: str | None
