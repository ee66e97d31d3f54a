"""What a training step needs of a host's memory where a CPU trains, from sizes alone.

Nothing is compiled there: every operation writes its result, and autograd keeps what its backward reads. Attention is
the CPU's flash kernel, which never writes scores; its mask, one number for every query and key, exists once. A backward
gives the layers back from the last to the first, while the gradients of the weights and of every layer's context keys
and values pile up, so that the worst moment is at one of its ends.

The operations are those of drafter_trainer/drafter.py, block_mask.py and loss.py; what a forward keeps is compared with
autograd's own count, and peaks with those of processes, in tests/unit/plan/test_cpu_memory.py.

Shapes: T context tokens, R = A·B block rows, K = T + R keys, D hidden size, n features, H heads.
"""

from collections.abc import Mapping

from slipstream.plan.cost import checkpoint_bytes
from slipstream.plan.sizes import RunSizes
from slipstream.run_spec.objective import ObjectiveName

_MIB = 1 << 20

PROGRAM = 330 * _MIB
"""Python, torch, its libraries and the trainer's: 246 once they are loaded, 275 when a step has called them, measured;
16 for a block of a checkpoint being written; and what gRPC and threads take, from runs of the demo."""
_GAPS = 0.35
"""Of a step's own memory, once more: blocks that are free and not given back, as blocks of other sizes are asked for.
Fitted to fifteen shapes (benchmarks/memory_on_cpu.py); from process to process the same run differs by 5 %."""
_GIVEN_BACK = 32 * _MIB
"""A block that is larger goes back to the system at once: the most that glibc's threshold grows to."""
_GAPS_AGAIN = 0.6
"""The same, added where layers are computed again: blocks of a forward between those of a backward."""
_GAPS_OF_START = 0.4
"""Of the weights: the module's own, allocated before they moved into the flat buffer, are not all used again."""

_FLOAT = 4
_BOOL = 1
_NORMALISED = 2 * _FLOAT
"""Of a norm's every number: what enters and what is normalised, float32 both."""
_WITH_TARGET: Mapping[ObjectiveName, int] = {
    "cross_entropy": 24,
    "kl": 24,
    "reverse_kl": 24,
    "js": 28,
    "tv": 32,
    "lk_hybrid": 36,
}
"""Bytes of a logit under an objective that compares with the target's distribution: two distributions and their
logarithms, and what the objective needs besides; counted by torch's profiler."""
_SUMMED = 8
"""More where objectives are summed: 4 of two, 9 of all, counted."""


def kept_by_forward(sizes: RunSizes) -> dict[str, int]:
    """From the forward for the backward, by part; all layers together, without what is computed again."""
    again = min(sizes.checkpointed_layers, sizes.num_layers)
    # The embeddings ask for no gradient: the first layer's norm does not keep what enters it.
    unread = 0 if again else _FLOAT * sizes.block_rows * sizes.hidden_size
    parts = _context_kept(sizes) | {
        "layer inputs": again * _layer_input(sizes),
        "final norm": sizes.block_rows * sizes.hidden_size * (_NORMALISED + sizes.compute_bytes) - unread,
    }
    whole = {part: (sizes.num_layers - again) * size for part, size in _layer_kept(sizes).items()}
    return {part: size for part, size in (parts | whole).items() if size}


def mask_bytes(sizes: RunSizes) -> int:
    """The attention mask as numbers that are added to the scores."""
    return _pairs(sizes) * sizes.compute_bytes


def held_on_cpu(sizes: RunSizes) -> dict[str, int]:
    """From the start to the end of the run, by part."""
    parameters, table = sizes.parameters, sizes.vocab_size * sizes.hidden_size * sizes.compute_bytes
    packs = max(sizes.prefetch_packs, sizes.packs_per_step) + sizes.packs_per_step
    return {
        "embedding": table,
        "head": 0 if sizes.tie_word_embeddings else table,
        "weights": parameters * sizes.compute_bytes if sizes.compute_bytes < _FLOAT else 0,
        "masters": parameters * _FLOAT,
        "gradients": parameters * _FLOAT,
        "optimizer": sizes.optimizer_numbers * _FLOAT,
        "moving average": parameters * _FLOAT if sizes.moving_average else 0,
        "packs": packs * sizes.pack_bytes,
        "held-out packs": sizes.heldout_tokens * sizes.measured_pack_bytes // sizes.pack_tokens,
        # Written from a copy while training goes on.
        "checkpoint's copy": checkpoint_bytes(sizes),
        "workspace": 0,
    }


def step_on_cpu(sizes: RunSizes, logit_rows: int, update: int) -> dict[str, Mapping[str, int]]:
    """What each phase of a step has besides, by part.

    Args:
        sizes: of the run.
        logit_rows: whose logits exist at once.
        update: bytes of the optimizer's step.
    """
    wide, stream = sizes.compute_bytes, sizes.block_rows * sizes.hidden_size * sizes.compute_bytes
    again = min(sizes.checkpointed_layers, sizes.num_layers)
    noisy = sizes.num_features * sizes.pack_tokens * sizes.hidden_size * sizes.wire_bytes if sizes.feature_noise else 0
    step = {"attention mask": mask_bytes(sizes), "features with noise": noisy}
    kept = {"activations": sum(kept_by_forward(sizes).values())} | step
    forward = {
        "mask as it is built": _pairs(sizes) * _BOOL,
        "context keys and values": (sizes.num_layers - again) * _context_keys(sizes),
        "a layer's intermediates": 2 * stream + (layer_forward(sizes) if again == sizes.num_layers else 0),
    }
    target = sizes.pack_tokens * sizes.hidden_size * (wide + _FLOAT) if sizes.needs_target_distribution else 0
    return {
        "forward": kept | forward,
        "loss": kept
        | {
            "logits": logit_rows * sizes.vocab_size * bytes_per_logit(sizes),
            "hidden states": stream,
            "target's hidden states": target,
        },
        "backward": _worst_of_backward(sizes, step),
        # Gradients are summed and gone when the update begins.
        "optimizer": {"gradients as computed": max(0, sizes.parameters * wide - update), "update": update},
    }


def measuring_on_cpu(sizes: RunSizes, logit_rows: int) -> dict[str, int]:
    """A forward that keeps nothing for a backward, and the choices of a chunk; by part."""
    wide, rows, hidden = sizes.compute_bytes, sizes.block_rows, sizes.hidden_size
    return {
        "activations": sizes.pack_tokens * (sizes.num_features + 1) * hidden * wide
        + sizes.num_layers * _context_keys(sizes)
        + 4 * rows * hidden * wide
        + layer_forward(sizes),
        "attention mask": mask_bytes(sizes) + _pairs(sizes) * _BOOL,
        "logits": logit_rows * sizes.vocab_size * (wide if wide == _FLOAT else wide + _FLOAT),
    }


def gaps_on_cpu(sizes: RunSizes, worst_phase: int) -> int:
    """What the C library's allocator holds beyond what is used, at a phase of so many bytes."""
    share = _GAPS + (_GAPS_AGAIN if sizes.checkpointed_layers else 0.0)
    small = max(0, worst_phase - _in_large_blocks(sizes))
    return round(share * small + _GAPS_OF_START * _FLOAT * sizes.parameters)


def _in_large_blocks(sizes: RunSizes) -> int:
    """Of a step's memory, what lies in blocks that leave no gap."""
    wide, row = sizes.compute_bytes, sizes.block_rows * sizes.compute_bytes
    layers = max(1, sizes.num_layers - sizes.checkpointed_layers)
    parts = {part: layers * size for part, size in _layer_kept(sizes).items()}
    features = sizes.pack_tokens * sizes.num_features * sizes.hidden_size * wide
    blocks = (
        (mask_bytes(sizes) // sizes.attention_masks, mask_bytes(sizes)),
        (features, features),
        (row * sizes.hidden_size, parts["residual stream"]),
        (row * sizes.query_width, parts["attention"]),
        (row * sizes.intermediate_size, parts["MLP"]),
    )
    return sum(together for block, together in blocks if block > _GIVEN_BACK)


def bytes_per_logit(sizes: RunSizes) -> int:
    """What a chunk has at once. Cross-entropy alone turns float32 logits into their gradient where they are; another
    precision has its own product and gradient beside them."""
    if sizes.needs_target_distribution:
        return max(_WITH_TARGET[name] for name in sizes.objectives) + (_SUMMED if len(sizes.objectives) > 1 else 0)
    return _FLOAT if sizes.compute_bytes == _FLOAT else _FLOAT + sizes.compute_bytes


def layer_forward(sizes: RunSizes) -> int:
    """At once inside a layer whose forward keeps nothing: gate, up and product, or queries with their norm's."""
    wide = sizes.compute_bytes
    mlp = 3 * sizes.intermediate_size * wide
    attention = sizes.query_width * (_NORMALISED + 2 * wide) + 2 * sizes.key_width * wide
    keys = 2 * _keys(sizes) * sizes.key_width * wide
    return max(sizes.block_rows * mlp, sizes.block_rows * attention + keys)


def _worst_of_backward(sizes: RunSizes, step: dict[str, int]) -> dict[str, int]:
    """At the worst of its moments: in the MLP of one of the layers, or behind the first of them, at the context.

    `step`: what is there until the layers are done.
    """
    moments = [_in_layer(sizes, layer) | step for layer in range(sizes.num_layers)]
    return max(*moments, _behind_layers(sizes), key=lambda parts: sum(parts.values()))


def _in_layer(sizes: RunSizes, layer: int) -> dict[str, int]:
    """At the gate of a layer: its down projection is done, later layers are gone, earlier ones wait."""
    wide, later = sizes.compute_bytes, sizes.num_layers - 1 - layer
    again, whole = min(sizes.checkpointed_layers, sizes.num_layers), sum(_layer_kept(sizes).values())
    waiting = min(layer + 1, again) * _layer_input(sizes) + max(0, layer + 1 - again) * whole
    computed_again = whole if layer < again else 0
    one_of_mlp = sizes.block_rows * sizes.intermediate_size * wide
    down = sizes.hidden_size * sizes.intermediate_size
    return {
        "activations": sum(_context_kept(sizes).values()) + waiting,
        "a layer computed again": computed_again,
        "mask as it is built": _pairs(sizes) * _BOOL if again else 0,
        "gradients as computed": (later * sizes.linear_parameters + down) * wide,
        "gradients of the context": later * _context_keys(sizes),
        "a layer's intermediates": 2 * one_of_mlp + 2 * sizes.block_rows * sizes.hidden_size * wide,
    }


def _behind_layers(sizes: RunSizes) -> dict[str, int]:
    """At the context: the layers' gradients are there, then those of keys and values go and `fc`'s comes."""
    wide, fc = sizes.compute_bytes, sizes.num_features * sizes.hidden_size**2
    return {
        "activations": sum(_context_kept(sizes).values()),
        "gradients as computed": (sizes.parameters - fc) * wide,
        "gradients of the context": max(fc * wide, sizes.num_layers * _context_keys(sizes)),
        "a layer's intermediates": 2 * sizes.pack_tokens * sizes.hidden_size * wide,
    }


def _context_kept(sizes: RunSizes) -> dict[str, int]:
    tokens, hidden, wide = sizes.pack_tokens, sizes.hidden_size, sizes.compute_bytes
    # A key's norm keeps a number a head besides.
    of_keys = sizes.num_layers * (sizes.key_width * _NORMALISED + sizes.num_key_value_heads * _FLOAT)
    return {
        "context features": tokens * sizes.num_features * hidden * wide,
        "context": tokens * (hidden * (_NORMALISED + wide) + of_keys),
        "rotary tables": 2 * sizes.head_dim * _FLOAT * _keys(sizes),
    }


def _layer_kept(sizes: RunSizes) -> dict[str, int]:
    wide, rows, hidden = sizes.compute_bytes, sizes.block_rows, sizes.hidden_size
    queries = sizes.query_width * (_NORMALISED + 3 * wide)  # rotated, attended, and as the output projection reads it
    block_keys = sizes.key_width * _NORMALISED
    statistics = _FLOAT * (2 * sizes.num_attention_heads + sizes.num_key_value_heads + 2)
    return {
        "residual stream": 2 * rows * hidden * (_NORMALISED + wide),
        "attention": rows * (queries + block_keys) + 2 * _keys(sizes) * sizes.key_width * wide,
        "norms and softmax": rows * statistics,
        "MLP": 4 * rows * sizes.intermediate_size * wide,  # gate, its activation, up, product
    }


def _layer_input(sizes: RunSizes) -> int:
    """What a layer that is computed again keeps: the block, and its context's keys and values."""
    return sizes.block_rows * sizes.hidden_size * sizes.compute_bytes + _context_keys(sizes)


def _context_keys(sizes: RunSizes) -> int:
    return 2 * sizes.pack_tokens * sizes.key_width * sizes.compute_bytes


def _keys(sizes: RunSizes) -> int:
    """K, not padded."""
    return sizes.pack_tokens + sizes.block_rows


def _pairs(sizes: RunSizes) -> int:
    """Of a query and a key, of the block rows with everything, in every mask."""
    return sizes.attention_masks * sizes.block_rows * _keys(sizes)
