"""From a run definition to a loop that may train: every check in order of its cost, every refusal in words.

environment → target → frozen weights, drafter and warm-up (`build_step`), first drafter and held-out answers between
them → weights (`starting_weights`) → subscription and incarnation → loop
"""

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from drafter_trainer.agent_line import NO_AGENT, AgentLine
from drafter_trainer.batch_source import BatchSource
from drafter_trainer.build_step import build_step, compiled_for, prepare_device, warm_up_step
from drafter_trainer.checkpoint import go_on_from
from drafter_trainer.checkpoint_writer import CheckpointWriter
from drafter_trainer.compile_cache import compiling_turn
from drafter_trainer.cost_report import CostReport
from drafter_trainer.device_copy import DeviceCopy
from drafter_trainer.device_failures import Phase, failures_reported, reports_kept_in
from drafter_trainer.drafter_config import DrafterConfig
from drafter_trainer.first_drafter_record import RECORD, FirstDrafter
from drafter_trainer.heldout import prepare_heldout
from drafter_trainer.loop import RunParts, Standing, TrainingLoop
from drafter_trainer.memory import MemoryReport
from drafter_trainer.metrics import MetricsFile
from drafter_trainer.progress import Progress
from drafter_trainer.resume import check_same_length
from drafter_trainer.run_directory import RunDirectory
from drafter_trainer.starting_weights import SavedState, check_first_drafter, find_saved_state, load_weights
from drafter_trainer.step_report import StepReporter
from drafter_trainer.stop_request import StopRequest
from drafter_trainer.target_link import Position, TargetLink
from drafter_trainer.wait_notice import WaitNotice
from slipstream.run_length import total_steps
from slipstream.run_spec.load import canonical_json
from slipstream.run_spec.spec import RunSpec
from slipstream.telemetry.logs import log_event
from slipstream.wire.channel import TargetClient, WaitInterruptedError
from slipstream.wire.data_report import DataReport
from slipstream.wire.target_config import TargetConfig

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
    if loop.is_finished:
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
    first = None if spec.drafter.init_from is None else FirstDrafter(run, spec.drafter.init_from)
    if saved is None and first is not None:
        first.find()
    notice = WaitNotice(options.target, options.agent)
    with ExitStack() as leaving:
        leaving.enter_context(reports_kept_in(run.root / "failures"))
        client = leaving.enter_context(
            TargetClient(options.target, token=options.token, on_wait=notice, on_answer=notice.over, stop=stop.event)
        )
        stop.add_listener(client.interrupt)
        link = TargetLink(client, notice, spec, run, pin_memory=device.type == "cuda")
        leaving.callback(link.close)
        target = link.handshake(saved.target_fingerprint if saved else None)
        target_config = TargetConfig.from_json(target.target_config_json)
        memory = MemoryReport(spec, target_config, device)
        memory.require_room()
        leaving.enter_context(memory.shortage_explained())
        step, config, plan = build_step(spec, link, target, device, memory)
        if saved is None:
            with failures_reported(Phase.WEIGHTS):
                check_first_drafter(step, spec, link.fingerprint, first)
        heldout = prepare_heldout(spec, config, client, link)
        what = "" if cache is None else compiled_for(spec, config, plan, device)
        with compiling_turn(cache, what, stop.event):
            warm_up_step(step, plan, target)
        memory.take(step.memory)
        memory.log()
        with failures_reported(Phase.WEIGHTS):
            source_of_weights = load_weights(step, run, spec, link.fingerprint, first)
        standing = join(link, run, spec, config, source_of_weights)
        _write_reports(link, run, memory, first if source_of_weights is None else None)
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
        step_tokens = spec.train.packs_per_step * spec.data.pack_tokens
        reporter = StepReporter(total_steps=total_steps, tokens_per_step=step_tokens, block_size=config.block_size)
        progress = Progress(total_steps, log_every=options.log_every)
        leaving.callback(progress.end)
        leaving.callback(source.close)
        source.start(standing.next_step)
        costs = CostReport(spec, memory)
        parts = RunParts(spec, config, step, source, link, run, metrics, progress, reporter, costs, writer, heldout)
        yield TrainingLoop(parts, standing)


def _write_reports(link: TargetLink, run: RunDirectory, memory: MemoryReport, begun_with: FirstDrafter | None) -> None:
    """What memory is predicted, and, of a run that begins with a drafter now, which one that was."""
    with link.incarnation_held() as incarnation:
        run.write_report("memory.json", memory.to_json(), incarnation)
        if begun_with is not None:
            run.write_report(RECORD, begun_with.to_json(), incarnation)


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
    end = link.end_sequence_number
    total = total_steps(spec, None if end is None else end - link.first_sequence_number)
    assert total is not None, "a run of epochs has an end"
    if saved is None:
        return Standing(0, total)
    check_same_length(saved.state, total)
    return Standing(saved.state.cursor.next_step, total, saved.state.loop, saved.directory)
