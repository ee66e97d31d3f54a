"""How a plan is shown to people: parts by phase, what fits where, time, wire and disk."""

from collections.abc import Sequence
from dataclasses import replace

from slipstream.cli.display import ABSENT, Column, duration, print_fields, print_table
from slipstream.counted import counted
from slipstream.epoch_length import EpochLength
from slipstream.plan.memory import MemoryPlan, saved_activations
from slipstream.plan.refusal import gib, in_words
from slipstream.plan.report import CardFit, RunPlan
from slipstream.plan.sizes import RunSizes
from slipstream.run_spec.spec import RunSpec

_MIB = 1 << 20
_GIB = 1 << 30


def print_plan(
    spec: RunSpec, plan: RunPlan, data: EpochLength | str | None, *, assumed_card: bool, assumed_speed: bool
) -> None:
    """Everything, in the order in which one asks.

    Args:
        spec: of the run.
        plan: of it.
        data: what its epochs come to, or why that is not known; None where it counts none.
        assumed_card: no card was given, and this machine has none.
        assumed_speed: no speed was given.
    """
    print_fields(_run_fields(spec, plan, assumed_card=assumed_card))
    kind = "Memory" if plan.sizes.on_cpu else "GPU memory"
    print(f"\n{kind} of the trainer on {plan.card.name}, MiB:")
    _print_memory(plan.memory)
    print("\nKept for the backward, all layers, MiB:")
    _print_activations(plan.sizes)
    print("\nTime, wire and disk:")
    print_fields(_cost_fields(plan, data, assumed_speed=assumed_speed) | _heldout_fields(spec, plan))
    print("\nWhat fits:")
    _print_cards(plan.cards if assumed_card else (plan.own, *plan.cards))


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f}" if size else ABSENT


def _verdict(own: CardFit) -> str:
    """Whether the run fits on the card of the plan, and by how much."""
    if own.refusal is not None:
        return f"cannot run there: {own.refusal}"
    left = own.gpu.memory_bytes - own.peak_bytes
    found = f"{gib(own.peak_bytes)} predicted, {gib(own.gpu.memory_bytes)} there"
    return f"fits: {found}, {gib(left)} left" if own.fits else f"does not fit: {found}, {gib(-left)} too little"


def _run_fields(spec: RunSpec, plan: RunPlan, *, assumed_card: bool) -> dict[str, str]:
    sizes = plan.sizes
    fields = {
        "run": spec.name,
        "drafter": f"{sizes.parameters / 1e6:,.1f} M parameters, {counted(sizes.num_layers, 'layer')} of "
        f"{sizes.hidden_size}",
        "step": f"{sizes.packs_per_step} x {sizes.pack_tokens} tokens, {counted(sizes.num_features, 'feature')}, "
        f"{sizes.anchors_per_pack} anchors of {sizes.block_size}",
        "memory": _verdict(plan.own),
    }
    if assumed_card:
        fields["note"] = "no --memory, and no GPU here: planned for an H200, and nothing is refused"
    if sizes.on_cpu:
        fields["note"] = "the trainer alone, on a CPU; the target server needs memory and cores besides"
    return fields


def _print_memory(memory: MemoryPlan) -> None:
    phases = tuple(memory.phases)
    columns = [Column("part"), *(Column(phase, is_number=True) for phase in phases)]
    rows = [[part, *[_mib(size)] * len(phases)] for part, size in memory.held.items() if size]
    parts = dict.fromkeys(part for phase in phases for part in memory.phases[phase])
    for part in parts:
        row = [memory.phases[phase].get(part, 0) for phase in phases]
        if any(row):
            rows.append([part, *map(_mib, row)])
    for part, size in memory.outside.items():
        rows.append([part, *[_mib(size)] * len(phases)])
    outside = sum(memory.outside.values())
    rows.append(["total", *(_mib(memory.phase_bytes(phase) + outside) for phase in phases)])
    print_table(columns, rows)


def _print_activations(sizes: RunSizes) -> None:
    kept = saved_activations(replace(sizes, checkpointed_layers=0))
    checkpointed = saved_activations(replace(sizes, checkpointed_layers=sizes.num_layers))
    parts = dict.fromkeys((*kept, *checkpointed))
    rows = [[part, _mib(kept.get(part, 0)), _mib(checkpointed.get(part, 0))] for part in parts]
    rows.append(["together", _mib(sum(kept.values())), _mib(sum(checkpointed.values()))])
    columns = [Column("part"), Column("as trained", is_number=True), Column("layers computed again", is_number=True)]
    print_table(columns, rows)


def _cost_fields(plan: RunPlan, data: EpochLength | str | None, *, assumed_speed: bool) -> dict[str, str]:
    cost = plan.cost
    speed = _flop(plan.tflops * 1e12) + "/s"
    if not assumed_speed:
        speed += ", as given"
    elif plan.sizes.on_cpu:
        speed += ", assumed: what two idle cores were measured at, for each core as much"
    else:
        whose = f"the {plan.card.as_fast_as or 'card'}'s"
        speed += f", assumed: {plan.tflops / plan.card.peak_tflops:.0%} of {whose} {plan.card.peak_tflops:.0f}"
    copy = "" if plan.sizes.on_cpu else ", and as much page-locked host memory"
    return {
        "work a step": _flop(cost.step_flop),
        "speed": speed,
        "time a step": _seconds(cost.step_seconds),
        "tokens": f"{cost.tokens_per_second:,.0f} a second",
        "the run": _length(plan, data),
        **_data_fields(data),
        "wire": f"{gib(cost.wire_bytes_per_pack)} a pack, {gib(cost.wire_bytes_per_second)} a second at that speed",
        "a checkpoint": f"{gib(cost.checkpoint_bytes)} of disk{copy}",
        "checkpoints": f"{gib(cost.disk_bytes)} of disk for those that are kept and one being written",
    }


def _heldout_fields(spec: RunSpec, plan: RunPlan) -> dict[str, str]:
    if spec.eval.heldout is None:
        return {}
    found = plan.heldout
    if found is None:
        how = "`slipstream data regenerate RECIPE --heldout` makes it"
        return {"held-out": f"{spec.eval.heldout} is no file here, so its packs and their time are not known; {how}"}
    total = found.total_seconds
    in_run = "" if total is None else f"; {found.measurements:,} in the run, {_seconds(total)}"
    return {
        "held-out": f"{counted(found.answers, 'answer')}, {found.tokens:,} tokens in {counted(found.packs, 'pack')}: "
        f"read once, {gib(found.host_bytes)} of host memory",
        "a measurement": f"{counted(found.forwards, 'forward')}, {_seconds(found.seconds)}{in_run}",
    }


def _flop(number: float) -> str:
    """In TFLOP, or in GFLOP where that would be a fraction."""
    return f"{number / 1e12:,.1f} TFLOP" if number >= 1e12 else f"{number / 1e9:,.1f} GFLOP"


def _length(plan: RunPlan, data: EpochLength | str | None) -> str:
    cost = plan.cost
    if cost.total_steps is None:
        return "as long as the data lasts: train.epochs decides, and its packs are not known"
    about = "at most " if isinstance(data, str) else ""
    if isinstance(data, EpochLength) and not data.exact:
        data_decides = cost.total_steps == data.packs // plan.sizes.packs_per_step
        about = "about " if data_decides else ""
    steps, seconds = counted(cost.total_steps, "step"), duration(cost.total_seconds)
    return f"{about}{steps}, {seconds} without waiting for packs"


def _data_fields(data: EpochLength | str | None) -> dict[str, str]:
    if data is None:
        return {}
    if isinstance(data, str):
        return {"the data": f"not counted: {data}; give --epoch-packs N"}
    about = "" if data.exact else "about "
    return {"the data": f"{about}{counted(data.packs, 'pack')} in {counted(data.epochs, 'epoch')}, {data.source}"}


def _seconds(seconds: float) -> str:
    if seconds >= 60:
        return duration(seconds)
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _print_cards(cards: Sequence[CardFit]) -> None:
    columns = [
        Column("on"),
        Column("has GiB", is_number=True),
        Column("needs GiB", is_number=True),
        Column("a step", is_number=True, rank=1),
        Column("fits", may_wrap=True),
    ]
    rows = []
    for card in cards:
        nearest = in_words(card.nearest) if card.nearest else card.refusal or "nothing that was tried"
        rows.append(
            [
                card.gpu.name,
                f"{card.gpu.memory_bytes / _GIB:.1f}",
                f"{card.peak_bytes / _GIB:.1f}",
                _seconds(card.cost.step_seconds),
                "yes" if card.fits else f"no; {nearest}",
            ]
        )
    print_table(columns, rows)
