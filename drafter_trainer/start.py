"""From a run definition to a loop that may train: every check in order of its cost, every refusal in words.

environment → target → frozen weights → drafter → held-out answers → warm-up → weights → subscription and
incarnation → loop
"""

import dataclasses
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafter_trainer.agent_line import NO_AGENT, AgentLine
from drafter_trainer.batch_source import BatchSource, PackPlan, payload_shapes
from drafter_trainer.checkpoint import go_on_from, load_checkpoint
from drafter_trainer.checkpoint_state import CheckpointState, newest_checkpoint, read_state
from drafter_trainer.checkpoint_writer import CheckpointWriter
from drafter_trainer.compile_cache import compiling_turn, use_compile_cache
from drafter_trainer.device_copy import DeviceCopy
from drafter_trainer.device_failures import Phase, failures_reported, reports_kept_in
from drafter_trainer.drafter_config import DrafterConfig, resolve_drafter_config
from drafter_trainer.formats.published_run import require_directory
from drafter_trainer.formats.tensors import check_parameters
from drafter_trainer.frozen_weights import read_frozen_weights
from drafter_trainer.heldout import prepare_heldout
from drafter_trainer.loop import RunParts, Standing, TrainingLoop
from drafter_trainer.memory import MemoryReport
from drafter_trainer.metrics import MetricsFile
from drafter_trainer.progress import Progress
from drafter_trainer.resume import check_same_length, check_same_run, restore_rng_state
from drafter_trainer.run_directory import RunDirectory
from drafter_trainer.step import COMPUTE_DTYPES, TrainingStep
from drafter_trainer.step_report import StepReporter
from drafter_trainer.stop_request import StopRequest
from drafter_trainer.target_link import Position, TargetLink, WaitNotice
from slipstream import __version__
from slipstream.errors import SlipstreamError
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.machine_probe import package_version
from slipstream.run_spec.device import resolve_device
from slipstream.run_spec.load import canonical_json
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from slipstream.telemetry.logs import log_event
from slipstream.wire.channel import TargetClient, WaitInterruptedError
from slipstream.wire.codec import DTYPES
from slipstream.wire.data_report import DataReport
from slipstream.wire.target_config import TargetConfig
from slipstream.wire.tensor_names import LAST_HIDDEN_STATE

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """What the command line adds to the run definition; none of it changes what is learned."""

    target: str
    """HOST:PORT"""
    run_directory: Path
    resume: bool
    log_every: float
    """Seconds between progress lines where stderr is no terminal."""
    threads: int | None
    """Of torch on the CPU; None: torch's choice."""
    token: str | None
    """The target's bearer token."""
    agent: AgentLine = NO_AGENT
    """To the agent that started this process, if one did."""


@dataclass(frozen=True)
class SavedState:
    """The checkpoint that weights came from."""

    directory: Path
    state: CheckpointState


def train(spec: RunSpec, options: RunOptions) -> int:
    """Train until the end, or until told to stop; returns the exit status.

    Raises:
        SlipstreamError: whatever makes the run impossible.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with StopRequest() as stop:
        options.agent.on_hang_up(stop.agent_gone)
        try:
            with prepared_loop(spec, options, stop) as loop:
                if not stop.event.is_set():
                    loop.run()
        except WaitInterruptedError as interrupted:
            log_event(_log, "info", "stopped", step="none", detail=interrupted.message)
            options.agent.ended("stopped")
            return 0
        how = _say_how_it_ended(spec, loop, stopped=stop.event.is_set(), by_hand=not options.agent.has_agent)
        options.agent.ended(how, loop.standing.next_step)
    return 0


def _say_how_it_ended(spec: RunSpec, loop: TrainingLoop, *, stopped: bool, by_hand: bool) -> str:
    standing = loop.standing
    facts = {
        "run": spec.name,
        "step": f"{standing.next_step}/{standing.total_steps}",
        "tokens": standing.loop.tokens,
        "checkpoint": standing.last_checkpoint and str(standing.last_checkpoint),
    }
    if torch.cuda.is_available():
        facts["peak_reserved_mib"] = torch.cuda.max_memory_reserved() >> 20
    if standing.next_step == standing.total_steps:
        log_event(_log, "info", "run_finished", **facts)
        return "finished"
    if stopped:
        # What an agent started is resumed by whoever told it so, not by this command.
        how_to = {"to_resume": "run the same command again"} if by_hand else {}
        log_event(_log, "info", "stopped", **facts, **how_to)
        return "stopped"
    log_event(_log, "warning", "stream_exhausted", **facts)
    return "exhausted"


@contextmanager
def prepared_loop(spec: RunSpec, options: RunOptions, stop: StopRequest) -> Iterator[TrainingLoop]:
    """A loop that is ready to run; leases, connections and files are given back when the block is left.

    Raises:
        SlipstreamError: whatever makes the run impossible.
    """
    device, cache = prepare_device(spec)
    run = RunDirectory(options.run_directory)
    saved = find_saved_state(run, spec, resume=options.resume)
    if saved is None:
        require_directory(spec.drafter.init_from)
    notice = WaitNotice(options.target, options.agent)
    with ExitStack() as leaving:
        leaving.enter_context(reports_kept_in(run.root / "failures"))
        client = leaving.enter_context(
            TargetClient(options.target, token=options.token, on_wait=notice, stop=stop.event)
        )
        stop.add_listener(client.interrupt)
        link = TargetLink(client, notice, spec, run, pin_memory=device.type == "cuda")
        leaving.callback(link.close)
        target = link.handshake(saved.target_fingerprint if saved else None)
        target_config = TargetConfig.from_json(target.target_config_json)
        memory = MemoryReport(spec, target_config, device)
        leaving.enter_context(memory.shortage_explained())
        step, config, plan = build_step(spec, link, target, device, memory)
        heldout = prepare_heldout(spec, config, client, link, notice)
        what = "" if cache is None else compiled_for(spec, config, plan, device)
        with compiling_turn(cache, what, stop.event):
            warm_up_step(step, plan, target)
        memory.take(step.memory)
        memory.log()
        with failures_reported(Phase.WEIGHTS):
            source_of_weights = load_weights(step, run, spec, link.fingerprint)
        standing = join(link, run, spec, config, source_of_weights)
        with link.incarnation_held() as incarnation:
            run.write_memory(memory.to_json(), incarnation)
        total_steps = standing.total_steps
        options.agent.joined(standing.next_step, total_steps)
        plan = dataclasses.replace(plan, first_sequence_number=link.first_sequence_number, total_steps=total_steps)
        source = BatchSource(link, plan, DeviceCopy(device), stop.event)
        stop.add_listener(source.wake)
        metrics = MetricsFile(run.metrics)
        leaving.callback(metrics.close)
        writer = CheckpointWriter(run, link.incarnation_held, keep=spec.checkpoint.keep, before_saving=metrics.sync)
        leaving.callback(writer.close)
        with failures_reported(Phase.SAVE):
            writer.prepare({"drafter": step.optimizer.deployed_weights(), "optimizer": step.optimizer.state_tensors()})
        reporter = StepReporter(
            total_steps=total_steps,
            tokens_per_step=spec.train.packs_per_step * spec.data.pack_tokens,
            block_size=config.block_size,
        )
        progress = Progress(total_steps, log_every=options.log_every)
        leaving.callback(progress.end)
        leaving.callback(source.close)
        source.start(standing.next_step)
        parts = RunParts(spec, config, step, source, link, run, metrics, progress, reporter, writer, heldout)
        yield TrainingLoop(parts, standing)


def prepare_device(spec: RunSpec) -> tuple[torch.device, Path | None]:
    """Decide where to train; on CUDA, make sure that attention cannot run dense there.

    Returns:
        The device, and the folder of the shared compile cache, if there is one.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED; what `use_compile_cache` raises.
    """
    cache = None
    device = torch.device(resolve_device(spec.train, torch.cuda.is_available()))
    if device.type == "cuda":
        # Here, because it loads the compiler, which a CPU run has no use for and waits two seconds for.
        from drafter_trainer.flex_policy import check_environment, configure_compiler, install_tripwire, self_test

        guards = check_environment(device)
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        cache = use_compile_cache(os.environ, built_for=compiler_and_device(device))
        configure_compiler()
        install_tripwire()
        self_test(device)
        log_event(_log, "info", "attention_guarded", guards=guards.in_words())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    log_event(_log, "info", "device", device=str(device), name=name, precision=spec.train.precision)
    return device, cache


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


def build_step(
    spec: RunSpec, link: TargetLink, target: pb.GetTargetResponse, device: torch.device, memory: MemoryReport
) -> tuple[TrainingStep, DrafterConfig, PackPlan]:
    """The step for this target, not warmed up; the plan lacks only its place in the stream.

    Raises:
        SlipstreamError: TARGET_INCOMPATIBLE, SPEC_INVALID, ENVIRONMENT_UNSUPPORTED, OUT_OF_MEMORY.
    """
    target_config = TargetConfig.from_json(target.target_config_json)
    config = resolve_drafter_config(spec.drafter, target_config)
    if device.type == "cuda" and config.attention_head_dim is not None:
        from drafter_trainer.flex_policy import check_head_dim

        check_head_dim(device, config.attention_head_dim)
    with failures_reported(Phase.FROZEN_WEIGHTS):
        frozen = read_frozen_weights(
            link.reader, target, target_config, device=device, compute_dtype=COMPUTE_DTYPES[spec.train.precision]
        )
        memory.note("frozen weights")
    with failures_reported(Phase.DRAFTER):
        step = TrainingStep(config, frozen, spec)
        memory.note("drafter and optimizer")
    plan = PackPlan(
        first_sequence_number=0,
        packs_per_step=spec.train.packs_per_step,
        total_steps=0,
        tensor_shapes=payload_shapes(hidden_state_names(spec, config), spec.data.pack_tokens, config.hidden_size),
        num_anchors=spec.train.anchors_per_pack,
        seed=spec.train.seed,
        prefetch_packs=spec.stream.prefetch_packs,
        lease_seconds=spec.stream.lease_seconds,
    )
    parameters = sum(weight.numel() for weight in step.optimizer.weights().values())
    log_event(
        _log, "info", "drafter", architecture=config.architecture, parameters=parameters,
        target_layers=config.target_layer_ids,
    )  # fmt: skip
    return step, config, plan


def warm_up_step(step: TrainingStep, plan: PackPlan, target: pb.GetTargetResponse) -> None:
    """On CUDA: compile the step, compare its gradients, run it; nothing compiles afterwards.

    Raises:
        SlipstreamError: LOSS_NOT_FINITE, OUT_OF_MEMORY, ENVIRONMENT_UNSUPPORTED.
    """
    if step.device.type != "cuda":
        return
    from drafter_trainer.warmup import warm_up

    with failures_reported(Phase.WARM_UP, plan.tensor_shapes):
        feature_dtype = DTYPES[target.hidden_state_data_type]
        warm_up(step, plan, feature_dtype, vocab_size=step.drafter.config.vocab_size)


def compiler_and_device(device: torch.device) -> tuple[str, str, str]:
    """Code that was compiled with the one for the other serves nobody else."""
    triton = package_version("triton")
    return f"torch-{torch.__version__}", f"triton-{triton}", torch.cuda.get_device_name(device)


def compiled_for(spec: RunSpec, config: DrafterConfig, plan: PackPlan, device: torch.device) -> str:
    """All that decides what is compiled."""
    train = spec.train.model_dump_json(exclude={"seed", "max_steps", "max_tokens", "epochs", "max_not_finite_steps"})
    measures = "measures" if spec.eval.heldout is not None else ""
    run = config.to_json(), train, spec.loss.model_dump_json(), f"{plan.pack_lengths} {plan.num_anchors}", measures
    return "\n".join((__version__, *compiler_and_device(device), *run))


def hidden_state_names(spec: RunSpec, config: DrafterConfig) -> tuple[str, ...]:
    """What a step reads of the target: features and, only where the objective needs it, the last hidden state."""
    return config.feature_names + ((LAST_HIDDEN_STATE,) if spec.loss.needs_target_distribution else ())


def load_weights(step: TrainingStep, run: RunDirectory, spec: RunSpec, target_fingerprint: str) -> SavedState | None:
    """Fill weights, optimizer and generators in place; returns the checkpoint they came from, if any.

    The checkpoint is looked for again: while this process warmed up, a trainer that still runs has saved newer ones.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID.
    """
    with run.unchanged():
        directory = newest_checkpoint(run.checkpoints)
        checkpoint = load_checkpoint(directory) if directory else None
    if directory is None or checkpoint is None:
        step.load_weights(first_weights(step, spec, target_fingerprint))
        torch.manual_seed(spec.train.seed)
        return None
    check_same_run(checkpoint.state, spec, where=str(directory))
    check_parameters(checkpoint.drafter, step.drafter.config, str(directory), must_be_finite=False)
    step.load_weights(checkpoint.drafter)
    step.optimizer.load_state(checkpoint.optimizer)
    restore_rng_state(checkpoint.rng)
    log_event(_log, "info", "resumed", run=spec.name, next_step=checkpoint.state.cursor.next_step)
    return SavedState(directory, checkpoint.state)


def first_weights(step: TrainingStep, spec: RunSpec, target_fingerprint: str) -> dict[str, Tensor]:
    """What step 0 begins with, float32 on the CPU: drawn from the seed, or those of `drafter.init_from`.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, TARGET_INCOMPATIBLE, SPEC_INVALID: that drafter cannot be the beginning.
    """
    if spec.drafter.init_from is None:
        return step.first_weights(spec.train.seed)
    # Here, because it loads transformers, which training has no use for.
    from drafter_trainer.formats.first_weights import TrainedTarget, read_first_weights

    tables = {"embed_tokens.weight": step.frozen.embedding, "lm_head.weight": step.frozen.head}
    target = TrainedTarget(target_fingerprint, spec.target.dtype, tables)
    return read_first_weights(Path(spec.drafter.init_from), step.drafter.config, target)


def join(
    link: TargetLink, run: RunDirectory, spec: RunSpec, config: DrafterConfig, saved: SavedState | None
) -> Standing:
    """Subscribe, begin a new incarnation, claim the run directory; returns where the run stands.

    Raises:
        SlipstreamError: STREAM_CHANGED, INCARNATION_STALE; DATA_INVALID when the data is less than one step.
    """
    position = Position(incarnation=run.newest_incarnation())
    if saved is not None:
        cursor = saved.state.cursor
        position = Position(
            next_step=cursor.next_step,
            first_sequence_number=cursor.first_sequence_number,
            quarantined=cursor.quarantined,
            incarnation=max(position.incarnation, saved.state.incarnation),
            stream=saved.state.stream,
        )
    opened = link.begin(position, config.target_layer_ids)
    for line in DataReport.model_validate_json(opened.data_report_json).summary_lines():
        log_event(_log, "info", "data", report=line)
    with link.incarnation_held() as incarnation:
        if saved is not None:
            go_on_from(run, saved.directory, incarnation)
        run.write_spec(canonical_json(spec), incarnation)
    total = total_steps(spec, link.end_sequence_number, link.first_sequence_number)
    if total == 0:
        raise SlipstreamError(
            "The data does not fill one step.",
            reason=Reason.DATA_INVALID,
            remedy="Lower train.packs_per_step or data.pack_tokens, raise train.epochs, or add conversations.",
        )
    if saved is None:
        return Standing(0, total)
    check_same_length(saved.state, total)
    return Standing(saved.state.cursor.next_step, total, saved.state.loop, saved.directory)


def total_steps(spec: RunSpec, end_sequence_number: int | None, first_sequence_number: int) -> int:
    """Whole steps of the run: max_steps, max_tokens (never more tokens than that) or epochs, whichever comes first."""
    train = spec.train
    limits = [
        train.max_steps,
        None if train.max_tokens is None else train.max_tokens // (train.packs_per_step * spec.data.pack_tokens),
        None if end_sequence_number is None else (end_sequence_number - first_sequence_number) // train.packs_per_step,
    ]
    return min(limit for limit in limits if limit is not None)
