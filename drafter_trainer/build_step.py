"""The step of a run: on which device, for which target, compiled and tried before the first pack comes."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from drafter_trainer.attention_guard import compiler_and_device, guard_attention
from drafter_trainer.device_failures import Phase, failures_reported
from drafter_trainer.drafter_config import DrafterConfig, resolve_drafter_config
from drafter_trainer.frozen_weights import read_frozen_weights
from drafter_trainer.memory import MemoryReport
from drafter_trainer.step import COMPUTE_DTYPES, TrainingStep
from drafter_trainer.target_link import TargetLink
from drafter_trainer.training_packs import PackPlan, payload_shapes
from slipstream import __version__
from slipstream.counted import counted
from slipstream.hidden_states.v1 import hidden_state_service_pb2 as pb
from slipstream.run_spec.device import resolve_device
from slipstream.run_spec.spec import RunSpec
from slipstream.telemetry.logs import log_event
from slipstream.wire.codec import DTYPES
from slipstream.wire.target_config import TargetConfig
from slipstream.wire.tensor_names import LAST_HIDDEN_STATE

_log = logging.getLogger(__name__)


def prepare_device(spec: RunSpec) -> tuple[torch.device, Path | None]:
    """Decide where to train; on CUDA, make sure that attention cannot run dense there.

    Returns:
        The device, and the folder of the shared compile cache, if there is one.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED; OUT_OF_MEMORY, other programs have the GPU; what `use_compile_cache`
            raises.
    """
    cache = None
    device = torch.device(resolve_device(spec.train, torch.cuda.is_available()))
    if device.type == "cuda":
        found = guard_attention(device, shares_cache=True)
        device, cache = torch.device("cuda", 0), found.cache
        log_event(_log, "info", "attention_guarded", guards=found.guards.in_words())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else counted(torch.get_num_threads(), "thread")
    log_event(_log, "info", "device", device=str(device), name=name, precision=spec.train.precision)
    return device, cache


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
    plan = pack_plan(spec, hidden_state_names(spec, config), config.hidden_size)
    parameters = sum(weight.numel() for weight in step.optimizer.weights().values())
    log_event(
        _log, "info", "drafter", architecture=config.architecture, parameters=parameters,
        target_layers=config.target_layer_ids,
    )  # fmt: skip
    return step, config, plan


def pack_plan(spec: RunSpec, hidden_states: Sequence[str], hidden_size: int) -> PackPlan:
    """What is fetched for a step; it lacks only its place in the stream."""
    return PackPlan(
        first_sequence_number=0,
        packs_per_step=spec.train.packs_per_step,
        total_steps=0,
        tensor_shapes=payload_shapes(hidden_states, spec.data.pack_tokens, hidden_size),
        num_anchors=spec.train.anchors_per_pack,
        seed=spec.train.seed,
        prefetch_packs=spec.stream.prefetch_packs,
        lease_seconds=spec.stream.lease_seconds,
    )


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


def compiled_for(spec: RunSpec, config: DrafterConfig, plan: PackPlan, device: torch.device) -> str:
    """All that decides what is compiled."""
    train = spec.train.model_dump_json(exclude={"seed", "max_steps", "max_tokens", "epochs", "max_not_finite_steps"})
    measures = "measures" if spec.eval.heldout is not None else ""
    run = config.to_json(), train, spec.loss.model_dump_json(), f"{plan.pack_lengths} {plan.num_anchors}", measures
    return "\n".join((__version__, *compiler_and_device(device), *run))


def hidden_state_names(spec: RunSpec, config: DrafterConfig) -> tuple[str, ...]:
    """What a step reads of the target: features and, only where the objective needs it, the last hidden state."""
    return config.feature_names + ((LAST_HIDDEN_STATE,) if spec.loss.needs_target_distribution else ())
