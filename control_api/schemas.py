"""What travels over REST: bodies that clients send (…Create, …Update, …Report) and resources they read (…Public)."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from control_api.data_account import DataAccount
from control_api.field_types import Body, JsonObject, Moment, Name, Resource, Text
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.states import Condition, DesiredState, RunState, Verb

# ---- problems


class FieldError(Resource):
    """One thing that is wrong with a request."""

    location: str
    """Dotted path: `body.spec.train.max_steps`, `query.page_size`."""
    detail: str


class Problem(Resource):
    """RFC 9457 problem details; every answer that is not a success."""

    type: str
    title: str
    status: int
    detail: str
    reason: Reason
    trace_id: str
    """Also in the header X-Trace-Id and in the server's log."""
    current_state: RunState | None = None
    """Of the run, when its state is why the request was refused."""
    allowed_verbs: list[Verb] | None = None
    """Verbs that lead out of that state."""
    errors: list[FieldError] | None = None


# ---- targets

TargetStatus = Literal["UNKNOWN", "REACHABLE", "LOADING", "DRAINING", "UNREACHABLE", "INCOMPATIBLE"]


class TargetCreate(Body):
    """A target server to register."""

    name: Name
    address: Annotated[str, Field(max_length=255, examples=["127.0.0.1:50051"])]
    """HOST:PORT or unix:PATH, as trainers reach it."""


class TargetPublic(Resource):
    """A registered target server, and what it said when it was asked last."""

    name: str
    address: str
    status: TargetStatus
    detail: str
    """Why it is not REACHABLE; empty otherwise."""
    model: str | None
    revision: str | None
    fingerprint: str | None
    server_version: str | None
    checked_at: Moment | None
    created_at: Moment


class PacksOf(Body):
    """Whose packs a target holds back, or gives again."""

    run: Name


# ---- runs


class RunCreate(Body):
    """A run to start: a definition (`spec`) or a recipe (`recipe`, TOML), never both."""

    target: Name | None = None
    """A registered target; default: the only one."""
    spec: JsonObject | None = None
    """The run definition as JSON; the schema RunSpec, read strictly."""
    recipe: Annotated[str, Field(max_length=200_000)] | None = None
    """Text of a recipe."""
    overrides: Annotated[list[Annotated[str, Field(max_length=10_000)]], Field(max_length=200, default_factory=list)]
    """`dotted.key=value`, as after --set; applied to the spec or recipe in order."""
    note: Text = ""

    @model_validator(mode="after")
    def _defined_once(self) -> Self:
        if (self.spec is None) == (self.recipe is None):
            raise ValueError("give either spec or recipe")
        return self


class RecipePublic(Resource):
    """A run definition that ships with Slipstream."""

    name: str
    summary: str
    """Its first line."""
    text: str
    """TOML, to be sent as `recipe` of a new run."""


class RecipeList(Resource):
    """All of them, sorted by name."""

    recipes: list[RecipePublic]


class RunUpdate(Body):
    """What may change on a run; its definition never does."""

    note: Text | None = None
    target: Name | None = None
    """Another registered target that serves the same model; only while no trainer works on the run."""


class ConditionPublic(Resource):
    """Something worth saying beside the state."""

    type: Condition
    message: str
    since: Moment


class Progress(Resource):
    """How far a run is."""

    step: int
    """Optimizer steps trained."""
    max_steps: int | None
    """Steps of the whole run; null until the trainer has counted the data of a run that ends by epochs."""
    fraction: float | None
    eta_seconds: float | None


Bottleneck = Literal["TARGET", "WIRE", "TRAINER", "BALANCED"]


class Throughput(Resource):
    """Over the last records of the metrics; what the target says, as of its last probe."""

    trainer_tokens_per_second: float
    target_tokens_per_second: float | None
    """Computed for the stream that the run reads, which other runs may share; null while unknown."""
    data_wait_ratio: float
    """Share of the time in which the trainer waited for packs."""
    bottleneck: Bottleneck | None
    """What decides the speed of the run; null while unknown."""


class HeldoutMeasure(Resource):
    """What decoding held-out prompts with the drafter would accept, measured while it trained (docs/evaluation.md)."""

    step: int
    """Steps that the weights had trained."""
    accepted_length: float
    """Tokens a round, bonus included, over all sources: every round weighs the same."""
    by_source: dict[str, float]
    """The same by source of the prompts."""


class Heldout(Resource):
    """Of a run that measures."""

    latest: HeldoutMeasure | None
    """Null: not yet."""
    best: HeldoutMeasure | None
    """Of the checkpoint that `best` points to, among those that are on disk; null while there is none."""


class RunPublic(Resource):
    """A run."""

    name: str
    target: str
    state: RunState
    desired_state: DesiredState
    allowed_verbs: list[Verb]
    """Those that move it now; one that it has followed already is accepted too, and changes nothing."""
    reason: Reason | None
    """Why it failed."""
    message: str
    """The same in words, with the remedy."""
    note: str
    directory: str
    """Name of its directory below the trainer's directory of runs; differs from `name` when that was used before."""
    progress: Progress
    throughput: Throughput | None
    latest_metrics: dict[str, Any] | None
    """The newest record of metrics.jsonl."""
    heldout: Heldout | None
    """Acceptance on held-out answers; null where the run does not measure it (eval.heldout)."""
    data: DataAccount | None
    """What its target found in its data; null until its trainer has a place there."""
    transport: str | None
    """How its trainer reads packs, `shm` or `grpc`, as the newest training process chose; null until one has."""
    packs_held_back: bool | None
    """Whether an operator lets its target give it no packs (`:pause` of the target), as the target said last.

    Null while it has said nothing of that since the run's trainer came, or left.
    """
    conditions: list[ConditionPublic]
    trainers: list[str]
    latest_checkpoint_step: int | None
    event_cursor: str
    """Give this as `cursor` to events:stream to receive what happens after this answer."""
    created_at: Moment
    updated_at: Moment


class StateChange(Resource):
    """One line of a run's history."""

    state: RunState
    cause: str
    """A verb, or an event of the system."""
    reason: Reason | None
    message: str
    time: Moment


class RunDetail(RunPublic):
    """A run with its definition and its history."""

    spec: dict[str, Any]
    history: list[StateChange]


# ---- what a run leaves behind


class CheckpointPublic(Resource):
    """A checkpoint of a run."""

    step: int
    incarnation: int
    path: str
    """On the trainer's host."""
    storage: str
    saved_at: Moment
    heldout: HeldoutMeasure | None
    """Null: it was not measured."""
    is_best: bool
    """No other checkpoint of the run that was measured on the same answers is better."""


class ExportCreate(Body):
    """A checkpoint to be written as an engine reads it."""

    to: Literal["vllm", "sglang", "zlab"]
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the tensors; default: the target's in the run definition."""
    without_self_test: bool = False
    """Do not decode with the files, which needs the run's target on this server's machine."""
    replace: bool = False
    """The directory may exist."""


class ExportPublic(Resource):
    """An export that was asked for."""

    id: int
    run: str
    step: int
    format: str
    output: str
    """Directory on this server's machine; it appears when the export has succeeded."""
    state: Literal["QUEUED", "RUNNING", "SUCCEEDED", "FAILED"]
    lines: list[str]
    """The last that the process wrote."""
    requested_at: Moment
    ended_at: Moment | None


class MetricPublic(Resource):
    """One step as it was measured. A step that was trained again after a resume has several; the last one counts."""

    step: int
    incarnation: int
    record: dict[str, Any]
    """The line of metrics.jsonl."""


class LogLinePublic(Resource):
    """One line of what a training process wrote."""

    id: int
    """Grows with every line of the run; the cursor of logs:stream."""
    attempt: int
    """The assignment of the run that it belongs to."""
    number: int
    """Zero-based line of the attempt's log file on the trainer's disk; what its agent skipped is missing."""
    text: str


class EventPublic(Resource):
    """Something that happened to a run."""

    id: int
    """Grows with every event of the run."""
    time: Moment
    source: str
    """`control-api`, or the trainer's name."""
    type: str
    message: str
    data: dict[str, Any]


class TargetList(Resource):
    """A page."""

    targets: list[TargetPublic]
    next_page_token: str | None


class RunList(Resource):
    """A page."""

    runs: list[RunPublic]
    next_page_token: str | None


class CheckpointList(Resource):
    """A page, oldest first."""

    checkpoints: list[CheckpointPublic]
    next_page_token: str | None


class ExportList(Resource):
    """A page, oldest first."""

    exports: list[ExportPublic]
    next_page_token: str | None


class MetricList(Resource):
    """A page, in the order of arrival."""

    metrics: list[MetricPublic]
    next_page_token: str | None


class LogList(Resource):
    """A page, oldest first."""

    logs: list[LogLinePublic]
    next_page_token: str | None


class EventList(Resource):
    """A page, oldest first."""

    events: list[EventPublic]
    next_page_token: str | None
