"""What a run costs besides memory: nominal work and time, bytes on the wire, bytes on the disk."""

from dataclasses import dataclass

from slipstream.plan.sizes import RunSizes

_FLOAT = 4


@dataclass(frozen=True)
class CostPlan:
    """Of one run on one GPU."""

    parameters: int
    step_flop: float
    step_seconds: float
    tokens_per_second: float
    total_steps: int | None
    """None: the length of the data decides."""
    wire_bytes_per_pack: int
    wire_bytes_per_second: float
    checkpoint_bytes: int
    disk_bytes: int
    """Of all that are kept, with the best one where that is measured, and one that is being written."""
    host_bytes: int
    """Page-locked: the copy that a checkpoint is written from."""

    @property
    def total_seconds(self) -> float | None:
        """Of the whole run; None where its length is not known."""
        return None if self.total_steps is None else self.total_steps * self.step_seconds


def step_flop(sizes: RunSizes) -> dict[str, float]:
    """Nominal floating-point operations of one optimizer step, by term; an anchor sees half of its pack.

    A product of [m, k] and [k, n] is 2·m·k·n. Layers: forward, gradient of input and of weight. The head is frozen: two
    products. Attention: two products forward, five backward; on a CPU with every key, since SDPA leaves no tile out.
    """
    rows, tokens, hidden = sizes.block_rows, sizes.pack_tokens, sizes.hidden_size
    keys = tokens + rows if sizes.on_cpu else tokens / 2
    projections = 2 * hidden * (sizes.query_width + sizes.key_width)
    one_pack = {
        "block projections": 6.0 * sizes.num_layers * rows * projections,
        "block MLPs": 6.0 * sizes.num_layers * rows * 3 * hidden * sizes.intermediate_size,
        "context keys and values": 6.0 * sizes.num_layers * tokens * 2 * hidden * sizes.key_width,
        "fc": 6.0 * tokens * sizes.num_features * hidden * hidden,
        "head": (6.0 if sizes.needs_target_distribution else 4.0) * rows * hidden * sizes.vocab_size,
        "attention": 14.0 * sizes.num_layers * rows * keys * sizes.query_width,
    }
    return {term: sizes.packs_per_step * flop for term, flop in one_pack.items()}


def forward_flop(sizes: RunSizes) -> float:
    """Of one pack, without a backward: a third of the products with trained weights, half of those with the head, two
    of attention's seven."""
    work = step_flop(sizes)
    trained = sum(flop for term, flop in work.items() if term not in ("head", "attention"))
    head = 2.0 * sizes.block_rows * sizes.hidden_size * sizes.vocab_size
    return (trained / 3 + work["attention"] * 2 / 7) / sizes.packs_per_step + head


def checkpoint_bytes(sizes: RunSizes) -> int:
    """Masters, the optimizer's state, the moving average: float32."""
    return _FLOAT * (sizes.parameters * (1 + sizes.moving_average) + sizes.optimizer_numbers)


def plan_cost(sizes: RunSizes, *, tflops: float, total_steps: int | None, keep: int) -> CostPlan:
    """Predict.

    Args:
        sizes: of the run.
        tflops: what the trainer achieves, in TFLOP/s of nominal work.
        total_steps: of the run, where that is known.
        keep: `checkpoint.keep`.
    """
    work = step_flop(sizes)
    flop = sum(work.values())
    # Computed again in the backward: a forward is a third of a layer's work, of its attention two products in seven.
    again = (work["block projections"] + work["block MLPs"]) / 3 + work["attention"] * 2 / 7
    again *= min(sizes.checkpointed_layers, sizes.num_layers) / sizes.num_layers
    seconds = (flop + again) / (tflops * 1e12)
    saved = checkpoint_bytes(sizes)
    return CostPlan(
        parameters=sizes.parameters,
        step_flop=flop,
        step_seconds=seconds,
        tokens_per_second=sizes.packs_per_step * sizes.pack_tokens / seconds,
        total_steps=total_steps,
        wire_bytes_per_pack=sizes.pack_bytes,
        wire_bytes_per_second=sizes.packs_per_step * sizes.pack_bytes / seconds,
        checkpoint_bytes=saved,
        disk_bytes=(keep + sizes.measures + 1) * saved,
        host_bytes=saved,
    )
