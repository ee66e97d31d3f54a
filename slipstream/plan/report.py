"""A whole plan: memory, cost and fits of a run, from a recipe and the sizes of its target."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from slipstream.plan.cost import CostPlan, forward_flop, plan_cost, step_flop
from slipstream.plan.gpus import GPUS, Gpu, assumed_tflops, why_not_there
from slipstream.plan.heldout import HeldoutAnswers, HeldoutCost, heldout_cost, read_answers
from slipstream.plan.memory import MemoryPlan, plan_memory, saved_activations
from slipstream.plan.refusal import nearest_there
from slipstream.plan.search import Fit, single_fits
from slipstream.plan.sizes import RunSizes, TargetSizes
from slipstream.run_length import total_steps
from slipstream.run_spec.spec import RunSpec


@dataclass(frozen=True)
class CardFit:
    """A run on one card."""

    gpu: Gpu
    peak_bytes: int
    cost: CostPlan
    nearest: Fit | None
    """Settings with which it fits; None where it fits as it is, or nothing that is tried does."""
    refusal: str | None = None
    """Why it cannot run there, however much memory there is; None if nothing is known against it."""

    @property
    def fits(self) -> bool:
        """As the recipe has it."""
        return self.refusal is None and self.peak_bytes <= self.gpu.memory_bytes


@dataclass(frozen=True)
class RunPlan:
    """Of one run."""

    sizes: RunSizes
    card: Gpu
    """Memory and cost are for it."""
    memory: MemoryPlan
    cost: CostPlan
    tflops: float
    heldout: HeldoutCost | None
    """None where nothing is measured, or where the file of the answers is not on this machine."""
    own: CardFit
    """The run on `card`."""
    cards: tuple[CardFit, ...]
    """The run on the known ones; none for a run on a CPU."""


def plan_run(
    spec: RunSpec, target: TargetSizes, card: Gpu, tflops: float | None = None, data_packs: int | None = None
) -> RunPlan:
    """Predict a run on one card, and whether it fits on the known ones.

    Args:
        spec: of the run.
        target: see `target_sizes`.
        card: to plan for.
        tflops: what the trainer achieves there; None: the assumed share of the card's peak.
        data_packs: of all epochs of the run, where that is known.

    Raises:
        SlipstreamError: SPEC_INVALID, sizes that do not go together; DATA_INVALID, held-out answers of no use, or data
            that does not fill one step.
    """
    sizes, answers = sizes_of_run(spec, target)
    reached = tflops or assumed_tflops(sizes, card)
    steps = total_steps(spec, data_packs)
    measuring = None
    if answers is not None:
        seconds = forward_flop(sizes) / (reached * 1e12)
        measuring = heldout_cost(spec, sizes, answers, forward_seconds=seconds, total_steps=steps)
    own = _card_fit(sizes, card, _cost(spec, sizes, reached, steps))
    return RunPlan(
        sizes=sizes,
        card=card,
        memory=plan_memory(sizes, card.memory_bytes),
        cost=own.cost,
        tflops=reached,
        heldout=measuring,
        own=own,
        cards=()
        if sizes.on_cpu
        else tuple(_card_fit(sizes, gpu, _cost(spec, sizes, assumed_tflops(sizes, gpu), steps)) for gpu in GPUS),
    )


def sizes_of_run(spec: RunSpec, target: TargetSizes) -> tuple[RunSizes, HeldoutAnswers | None]:
    """The sizes of a run, and the answers it is measured with, where it is, and they are on this machine.

    Raises:
        SlipstreamError: as `plan_run`.
    """
    sizes, answers = RunSizes.of(spec, target), read_answers(spec)
    if answers is not None:
        sizes = replace(
            sizes,
            least_pack_tokens=max(sizes.least_pack_tokens, answers.longest),
            heldout_tokens=answers.packs(sizes.pack_tokens) * sizes.pack_tokens,
        )
    return sizes, answers


def as_json(plan: RunPlan) -> dict[str, Any]:
    """For programs; bytes and seconds."""
    nearest, room = plan.own.nearest, plan.card.memory_bytes
    is_small = plan.own.refusal is None and not fits(plan)
    alone = single_fits(plan.sizes, room, room) if is_small else ()
    return {
        "card": {"name": plan.card.name, "memory_bytes": plan.card.memory_bytes},
        "parameters": plan.cost.parameters,
        "memory": {
            "held": dict(plan.memory.held),
            "phases": {
                phase: {"parts": dict(parts), "peak_bytes": plan.memory.phase_bytes(phase)}
                for phase, parts in plan.memory.phases.items()
            },
            "outside": dict(plan.memory.outside),
            "peak_bytes": plan.memory.peak_bytes,
            "peak_phase": plan.memory.worst_phase,
            "saved_activations": saved_activations(plan.sizes),
            "saved_activations_checkpointed": saved_activations(
                replace(plan.sizes, checkpointed_layers=plan.sizes.num_layers)
            ),
        },
        "step": {
            "flop": step_flop(plan.sizes),
            "tflops": plan.tflops,
            "seconds": plan.cost.step_seconds,
            "tokens_per_second": plan.cost.tokens_per_second,
        },
        "run": {"steps": plan.cost.total_steps, "seconds": plan.cost.total_seconds},
        "wire": {"bytes_per_pack": plan.cost.wire_bytes_per_pack, "bytes_per_second": plan.cost.wire_bytes_per_second},
        "disk": {"checkpoint_bytes": plan.cost.checkpoint_bytes, "kept_bytes": plan.cost.disk_bytes},
        "host": {"page_locked_bytes": plan.cost.host_bytes},
        "heldout": None
        if plan.heldout is None
        else asdict(plan.heldout) | {"total_seconds": plan.heldout.total_seconds},
        "fits": fits(plan),
        "refusal": plan.own.refusal,
        "nearest_settings": None if nearest is None else list(nearest.settings),
        "settings_enough_alone": [list(fit.settings) for fit in alone],
        "cards": [
            {
                "name": card.gpu.name,
                "memory_bytes": card.gpu.memory_bytes,
                "peak_bytes": card.peak_bytes,
                "fits": card.fits,
                "refusal": card.refusal,
                "nearest_settings": None if card.nearest is None else list(card.nearest.settings),
                "step_seconds": card.cost.step_seconds,
            }
            for card in plan.cards
        ],
    }


def fits(plan: RunPlan) -> bool:
    """On the plan's card."""
    return plan.own.fits


def _card_fit(sizes: RunSizes, gpu: Gpu, cost: CostPlan) -> CardFit:
    peak, refusal = plan_memory(sizes, gpu.memory_bytes).peak_bytes, why_not_there(sizes, gpu)
    fits_there = refusal is None and peak <= gpu.memory_bytes
    return CardFit(gpu, peak, cost, None if fits_there else nearest_there(sizes, gpu), refusal)


def _cost(spec: RunSpec, sizes: RunSizes, tflops: float, steps: int | None) -> CostPlan:
    return plan_cost(sizes, tflops=tflops, total_steps=steps, keep=spec.checkpoint.keep)
