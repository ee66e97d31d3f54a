"""What a training step needs of a device's memory, phase by phase, from sizes alone.

A part is held from the start (frozen weights, masters, optimizer, packs) or within a phase. The allocator's high-water
mark of a phase is what is held then plus what the phase adds; the plan's peak is the highest of them, with what lies
outside the allocator and what it loses between its blocks.

    forward → loss → backward → optimizer        and, where held-out acceptance is measured between steps: measurement

Activations: what a compiled layer keeps for its backward is what its products read or give, in the compute precision;
norms, rotary embedding, activation and residual sums are computed again. A compiled backward gives them back layer by
layer while gradients appear, so that it holds the larger of both. On a CPU nothing is compiled: `cpu_memory`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.plan.cpu_memory import (
    PROGRAM,
    gaps_on_cpu,
    held_on_cpu,
    kept_by_forward,
    measuring_on_cpu,
    step_on_cpu,
)
from slipstream.plan.loss_chunks import default_rows, default_rows_on_cpu, fullest_length
from slipstream.plan.sizes import MUON_NUMBERS_AT_ONCE, RunSizes

MIB = 1 << 20
GIB = 1 << 30

OUTSIDE_ALLOCATOR = 820 * MIB
"""CUDA context, loaded kernels, libraries: measured once, a trainer for a 135M target on an H200 held 4770 MiB of the
card, of which torch had reserved 3948."""
COMPILE_WORKSPACE = 64 * MIB
"""cuBLAS and split-k workspaces, which stay: assumed."""
SLACK_SHARE = 0.2
LARGEST_SLACK = 512 * MIB
"""Of the peak, and at most: rounding of blocks, and gaps between them. Measured on an H200: 8 to 25 % (160 to 780 MiB)
of drafters for a 135M target, 1 % (310 MiB) of one for Qwen3-8B, whose blocks are large."""
MEASUREMENT = "measurement"
"""The phase between two steps in which held-out acceptance is measured."""
_FLOAT = 4
_PACKS_IN_USE = 1
_PACKS_LET_GO = 1
"""One whose step has ended, and whose memory still waits for the stream."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part; `total` of a phase is what the allocator holds at its worst moment."""

    held: Mapping[str, int]
    """From the start to the end of the run."""
    phases: Mapping[str, Mapping[str, int]]
    """What each phase has besides, by part."""
    outside: Mapping[str, int]
    """Beside the allocator, and what it loses."""

    @property
    def held_bytes(self) -> int:
        """Between two steps."""
        return sum(self.held.values())

    def phase_bytes(self, phase: str) -> int:
        """Allocated at the worst moment of a phase."""
        return self.held_bytes + sum(self.phases[phase].values())

    @property
    def worst_phase(self) -> str:
        """The one that decides."""
        return max(self.phases, key=self.phase_bytes)

    @property
    def peak_bytes(self) -> int:
        """Of the device: the worst phase, and what lies outside."""
        return self.phase_bytes(self.worst_phase) + sum(self.outside.values())


def plan_memory(sizes: RunSizes, device_bytes: int) -> MemoryPlan:
    """Predict a run on a GPU of so much memory, which decides the default chunk of the loss; or on a CPU, see
    `cpu_memory`."""
    if sizes.on_cpu:
        return _plan_on_cpu(sizes)
    saved = saved_activations(sizes)
    kept = {
        "activations": sum(saved.values()),
        "hidden states": sizes.block_rows * sizes.hidden_size * sizes.compute_bytes,
    }
    computed = sizes.parameters * sizes.compute_bytes
    phases = {
        "forward": kept | {"a layer's intermediates": layer_intermediates(sizes)},
        "loss": kept
        | {"logits": logits_bytes(sizes, device_bytes), "gradient of the hidden states": kept["hidden states"]},
        "backward": kept
        | {
            "gradient of the hidden states": 2 * kept["hidden states"],
            "gradients as computed": max(0, computed - sum(saved.values())),
            "a layer's intermediates": backward_intermediates(sizes),
        },
        "optimizer": {"gradients as computed": 0 if sizes.sums_gradients else computed, "update": update_bytes(sizes)},
    }
    if sizes.measures:
        phases[MEASUREMENT] = measuring_parts(sizes, device_bytes)
        if sizes.cuda_graphs:
            # A recorded step keeps what it computes in; measuring is not recorded, and has memory of its own.
            recorded = max(sum(parts.values()) for phase, parts in phases.items() if phase != MEASUREMENT)
            phases[MEASUREMENT]["recorded step"] = recorded
    held = held_parts(sizes)
    worst = sum(held.values()) + max(sum(parts.values()) for parts in phases.values())
    outside = {"CUDA context": OUTSIDE_ALLOCATOR, "allocator slack": slack_bytes(worst)}
    return MemoryPlan(held, phases, outside)


def _plan_on_cpu(sizes: RunSizes) -> MemoryPlan:
    rows = chunk_blocks(sizes, 0) * (sizes.block_size - 1)
    phases = step_on_cpu(sizes, rows, update_bytes(sizes))
    if sizes.measures:
        phases[MEASUREMENT] = measuring_on_cpu(sizes, rows)
    worst = max(sum(parts.values()) for parts in phases.values())
    outside = {"Python and torch": PROGRAM, "allocator's gaps": gaps_on_cpu(sizes, worst)}
    return MemoryPlan(held_on_cpu(sizes), phases, outside)


def slack_bytes(allocated: int) -> int:
    """What the allocator reserves beyond a peak of so many bytes."""
    return min(LARGEST_SLACK, round(SLACK_SHARE * allocated))


def held_parts(sizes: RunSizes) -> dict[str, int]:
    """From the start to the end of the run, by part."""
    parameters, table = sizes.parameters, sizes.vocab_size * sizes.hidden_size
    packs = max(sizes.prefetch_packs, sizes.packs_per_step) + sizes.packs_per_step * _PACKS_IN_USE + _PACKS_LET_GO
    return {
        "embedding": table * sizes.compute_bytes,
        "head": (0 if sizes.tie_word_embeddings else table * sizes.compute_bytes) + (2 * table if sizes.fp8 else 0),
        "weights": weight_bytes(sizes),
        "masters": parameters * _FLOAT,
        "gradients": parameters * _FLOAT if sizes.sums_gradients else 0,
        "optimizer": sizes.optimizer_numbers * _FLOAT,
        "moving average": parameters * _FLOAT if sizes.moving_average else 0,
        "packs": packs * sizes.pack_bytes + recorded_inputs(sizes),
        # Page-locked, in the host's memory.
        "checkpoint's copy": 0,
        "workspace": COMPILE_WORKSPACE,
    }


def recorded_inputs(sizes: RunSizes) -> int:
    """Of the packs that CUDA graphs read: one for a step's first pack, one for the later ones."""
    return sizes.pack_bytes * min(2, sizes.packs_per_step) if sizes.cuda_graphs else 0


def weight_bytes(sizes: RunSizes) -> int:
    """Of the copies that the products read; float32 computes with the masters themselves."""
    reduced = sizes.parameters * sizes.compute_bytes if sizes.compute_bytes < _FLOAT else 0
    # Rounded once for the backward; the MLP's in a second layout for the forward.
    mlps = 3 * sizes.num_layers * sizes.hidden_size * sizes.intermediate_size
    return reduced + (sizes.matrix_parameters + mlps if sizes.fp8 else 0)


def saved_activations(sizes: RunSizes) -> dict[str, int]:
    """Kept from the forward for the backward, by part; all layers together."""
    if sizes.on_cpu:
        return kept_by_forward(sizes)
    wide, rows, hidden = sizes.compute_bytes, sizes.block_rows, sizes.hidden_size
    context = {
        "context features": sizes.pack_tokens * sizes.num_features * hidden * wide,
        "context": 2 * sizes.pack_tokens * hidden * wide,
        "block embeddings": rows * hidden * wide,
    }
    again = min(sizes.checkpointed_layers, sizes.num_layers)
    # The last layer's are there when its backward begins, kept or computed again.
    whole = max(1, sizes.num_layers - again)
    if again:
        # What enters a layer: the block, and keys and values of the context, of which the norm keeps its input, too.
        inputs = rows * hidden + 3 * sizes.pack_tokens * sizes.key_width
        context |= {"layer inputs": again * inputs * wide}
    return context | {part: whole * size for part, size in _one_layer(sizes).items()}


def _one_layer(sizes: RunSizes) -> dict[str, int]:
    wide, rows = sizes.compute_bytes, sizes.block_rows
    before_norm = rows * sizes.query_width + (sizes.pack_tokens + rows) * sizes.key_width
    attended = 2 * sizes.queries * sizes.query_width + 2 * sizes.keys * sizes.key_width
    statistics = _FLOAT * (sizes.queries * sizes.num_attention_heads + 2 * rows)
    return {
        "residual stream": 2 * rows * sizes.hidden_size * wide,
        "attention": (before_norm + attended) * wide,
        "norms and softmax": statistics,
        "MLP": 2 * rows * sizes.intermediate_size * wide,
    }


def layer_intermediates(sizes: RunSizes) -> int:
    """At once in a layer's forward, and not kept: the product of the gate, or queries and keys before padding."""
    return sizes.block_rows * max(sizes.intermediate_size, sizes.query_width) * sizes.compute_bytes


def backward_intermediates(sizes: RunSizes) -> int:
    """At once in a layer's backward: the gradients of gate and up with their product, and of the residual stream."""
    widest = max(
        3 * sizes.intermediate_size, 3 * sizes.query_width + 4 * sizes.key_width * sizes.keys // sizes.block_rows
    )
    return sizes.block_rows * (widest + 2 * sizes.hidden_size) * sizes.compute_bytes


def measuring_parts(sizes: RunSizes, device_bytes: int) -> dict[str, int]:
    """A forward that keeps nothing for a backward, and the logits of a chunk; by part."""
    wide, rows, hidden = sizes.compute_bytes, sizes.block_rows, sizes.hidden_size
    of_context = (sizes.num_features + 2) * hidden + 2 * sizes.num_layers * sizes.key_width
    of_layers = sum(_one_layer(sizes).values()) + layer_intermediates(sizes)
    chunk = chunk_blocks(sizes, device_bytes) * (sizes.block_size - 1)
    return {
        "held-out pack": sizes.measured_pack_bytes,
        "activations": (sizes.pack_tokens * of_context + rows * hidden) * wide + of_layers,
        "hidden states": rows * hidden * wide,
        "logits": chunk * sizes.vocab_size * wide,
    }


def used_bytes_per_logit(sizes: RunSizes) -> int:
    """What a chunk keeps at once. Compiled, in the compute precision: logits, gradient, and where they are needed the
    target's logits; there a float32 copy was seen besides. From peaks of runs on an H200 (135M target): 3.8, and with
    the target 5.9 to 9.9 before the loss's last change; the larger one, rounded up."""
    return 10 if sizes.needs_target_distribution else 4


def chunk_blocks(sizes: RunSizes, device_bytes: int) -> int:
    """Blocks whose logits exist at once: as the recipe says, or as many as a share of the device holds."""
    rows, slots = sizes.chunk_rows, sizes.block_size - 1
    with_target = sizes.needs_target_distribution
    if sizes.on_cpu:
        rows = rows or default_rows_on_cpu(sizes.vocab_size, with_target=with_target)
        chunks = -(-sizes.anchors_per_pack // max(1, rows // slots))
        return -(-sizes.anchors_per_pack // chunks)
    if rows is None:
        rows = default_rows(device_bytes, sizes.vocab_size, with_target=with_target)
    return fullest_length(sizes.anchors_per_pack, max(1, rows // slots), slots)


def logits_bytes(sizes: RunSizes, device_bytes: int) -> int:
    """Of one chunk."""
    rows = chunk_blocks(sizes, device_bytes) * (sizes.block_size - 1)
    return rows * sizes.vocab_size * used_bytes_per_logit(sizes)


def update_bytes(sizes: RunSizes) -> int:
    """Of the optimizer's step: nothing for AdamW, which works in place; Muon orthogonalises matrices of one shape
    together, in bfloat16: the batch, its iterate, the next one, and two Gram matrices, each at most as large."""
    if sizes.optimizer == "adamw":
        return 0
    hidden, layers = sizes.hidden_size, sizes.num_layers
    largest = max(sizes.num_features * hidden**2, hidden * max(sizes.intermediate_size, sizes.query_width))
    of_one_shape = max(largest, 2 * layers * hidden * max(sizes.intermediate_size, sizes.query_width))
    return 5 * 2 * min(of_one_shape, max(largest, MUON_NUMBERS_AT_ONCE))


def expected_in_warm_up(sizes: RunSizes, plan: MemoryPlan) -> dict[str, int]:
    """What the allocator holds at the worst moment of each phase of the warm-up, where one pack is on the device.

    That pack is the one that is measured there. What a recorded step computes in is reserved then, and nobody's.
    """
    frozen = plan.held["embedding"] + plan.held["head"]
    resident = plan.held_bytes - plan.held["packs"] - plan.held["workspace"]
    more = sizes.pack_bytes + plan.held["workspace"]
    elsewhere = {"held-out pack", "recorded step"}
    allocated = {
        phase: sum(size for part, size in parts.items() if part not in elsewhere)
        for phase, parts in plan.phases.items()
    }
    if MEASUREMENT in allocated:
        # The step is recorded by then; what it is measured in itself comes before.
        allocated[MEASUREMENT] += recorded_inputs(sizes)
    return {
        "frozen weights": frozen,
        "drafter and optimizer": resident,
        **{phase: resident + more + size for phase, size in allocated.items()},
    }
