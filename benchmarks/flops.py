"""Nominal work of one DFlash training step, term by term, from sizes alone.

Conventions, the usual ones, so that numbers compare with published ones. A product of [m, k] and [k, n] is 2·m·k·n:
* linear layers: forward, gradient of the input, gradient of the weight: 6 per weight and row. Block rows go through
  every matrix of a layer; context tokens through the key and value projections of every layer and through `fc`;
* head: frozen, so forward and gradient of the input only, 4 per weight and block row;
* attention: two products forward, five backward (scores are computed again), 14 per query, visible context key and
  width of the heads. A uniformly drawn anchor sees half of its document.

The strict count leaves out what a step need not compute: the gradient of the features (`fc` is the first layer), the
head on slot 0, the second computation of the scores.
"""

from benchmarks.peers.workload import Size

TERA = 1e12


def step_flops(size: Size, tokens: int | None = None, *, strict: bool = False) -> dict[str, float]:
    """TFLOP per optimizer step of one pack, by term.

    Args:
        size: of drafter and pack.
        tokens: pack length; default: `size.tokens`.
        strict: see the module's docstring.
    """
    tokens = tokens or size.tokens
    rows = size.anchors * size.block_size
    width, kv_width = size.heads * size.head_dim, size.kv_heads * size.head_dim
    projections = 2 * size.hidden * width + 2 * size.hidden * kv_width
    mlp = 3 * size.hidden * size.intermediate
    fc = size.num_features * size.hidden * size.hidden
    head_rows = size.anchors * (size.block_size - 1) if strict else rows
    mean_context = tokens / size.documents / 2
    return {
        "block projections": 6 * size.layers * rows * projections / TERA,
        "block MLPs": 6 * size.layers * rows * mlp / TERA,
        "context keys and values": 6 * size.layers * tokens * 2 * size.hidden * kv_width / TERA,
        "fc": (4 if strict else 6) * tokens * fc / TERA,
        "head": 4 * head_rows * size.hidden * size.vocab / TERA,
        "attention": (12 if strict else 14) * size.layers * rows * mean_context * width / TERA,
    }


def total_tflop(size: Size, tokens: int | None = None, *, strict: bool = False) -> float:
    """TFLOP per optimizer step of one pack."""
    return sum(step_flops(size, tokens, strict=strict).values())
