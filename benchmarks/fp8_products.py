"""Which matrix products pay in FP8 at Qwen3-8B's size, casts included; needs one GPU with FP8, about a minute.

    python -m benchmarks.fp8_products --out DIR

products: every product of a step alone, and the casts of its operands. mlp: forward and backward of one MLP, compiled
as in a run, so that casts join their neighbours. head: a chunk of the loss. Each in a process of its own.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS, Row, write_results

T, ROWS, HIDDEN, WIDE, KV, FEATURES, VOCABULARY = 4096, 8192, 4096, 12288, 1024, 20480, 151_936
HEAD_ROWS = 1536
LAYERS = 5
# Rows, inputs, outputs, how many in a step, whether the input needs a gradient.
LAYER_SHAPES = {
    "fc": (T, FEATURES, HIDDEN, 1, False),
    "q_proj": (ROWS, HIDDEN, HIDDEN, LAYERS, True),
    "k_proj or v_proj of blocks": (ROWS, HIDDEN, KV, 2 * LAYERS, True),
    "k_proj or v_proj of context": (T, HIDDEN, KV, 2 * LAYERS, True),
    "o_proj": (ROWS, HIDDEN, HIDDEN, LAYERS, True),
    "gate_proj or up_proj": (ROWS, HIDDEN, WIDE, 2 * LAYERS, True),
    "down_proj": (ROWS, WIDE, HIDDEN, LAYERS, True),
}
PARTS = ("products", "mlp", "head")
Times = dict[str, dict[str, float]]
"""Milliseconds by case and what was timed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--leave-by", type=float, default=120.0, help="seconds from now")
    parser.add_argument("--commit", help="for machines without the repository")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--part-out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        args.part_out.write_text(json.dumps(PART_FUNCTIONS[args.part]()), encoding="utf-8")
        return 0
    found, failed = measure_parts(time.monotonic() + args.leave_by)
    rows = rows_of(found)
    for line in table(found, failed):
        sys.stdout.write(line + "\n")
    if not rows:
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    extra = {"milliseconds": found, "failed": failed}
    path = write_results("fp8_products", rows, commit=args.commit, extra=extra, directory=args.out)
    sys.stdout.write(f"written: {path}\n")
    return 1 if failed else 0


def measure_parts(leave_by: float) -> tuple[dict[str, Times], dict[str, str]]:
    """Each part in its own process; what failed or was cut off, with its last words."""
    found: dict[str, Times] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        for part in PARTS:
            path = Path(directory) / f"{part}.json"
            command = [sys.executable, "-m", "benchmarks.fp8_products", "--part", part, "--part-out", str(path)]
            left = leave_by - time.monotonic()
            if left < 5:
                failed[part] = "no time left"
                continue
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
            except subprocess.TimeoutExpired:
                failed[part] = f"not done after {left:.0f} s"
                continue
            if done.returncode != 0:
                failed[part] = done.stderr[-2000:]
                continue
            found[part] = json.loads(path.read_text(encoding="utf-8"))
    return found, failed


def milliseconds(function: Callable[..., object], repetitions: int = 12) -> float:
    """Median on the device; three calls first, which compile."""
    import torch

    for _ in range(3):
        function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def products() -> Times:
    """Of every layer: three products in bfloat16 and FP8 (kernels alone), and the casts of x, dy and W."""
    import torch
    from torch import Tensor

    from drafter_trainer.fp8 import product, quantise

    torch._dynamo.config.recompile_limit = 64

    @torch.compile(fullgraph=True, dynamic=False)
    def both_layouts(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, scale = quantise(tensor)
        return values, values.t().contiguous(), scale

    @torch.compile(fullgraph=True, dynamic=False)
    def one_layout(tensor: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(quantise(tensor))  # type: ignore[return-value]

    times: Times = {}
    for name, (rows, inputs, outputs, _, needs_dx) in LAYER_SHAPES.items():
        states, weight, by_output = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        # left operands as [rows, contracted], right ones as [columns, contracted]
        pairs = {"forward": (states, weight), "dW": (by_output.t(), states.t())}
        if needs_dx:
            pairs["dx"] = (by_output, weight.t())
        found: dict[str, float] = {}
        for what, (left, right) in pairs.items():
            found[f"{what}, bf16"] = milliseconds(lambda a=left, b=right: a @ b.t())
            left_q, right_q = quantise(left.contiguous()), quantise(right.contiguous())
            for fast in (True, False):
                found[f"{what}, fp8{' fast' if fast else ''}"] = milliseconds(
                    lambda a=left_q, b=right_q, f=fast: product(a, b, fast=f)
                )
            del left_q, right_q
        for what, tensor in (("x", states), ("dy", by_output), ("W", weight)):
            found[f"cast of {what}, both layouts"] = milliseconds(lambda t=tensor: both_layouts(t))
            found[f"cast of {what}, one layout"] = milliseconds(lambda t=tensor: one_layout(t))
        times[name] = found
    return times


def mlp() -> Times:
    """Norm, MLP and residual of one layer, forward and backward, weights rounded before."""
    import torch
    from torch import Tensor, nn

    from drafter_trainer.drafter import GatedMLP, RMSNorm
    from drafter_trainer.fp8 import Fp8Linear

    states = torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    direction = torch.randn_like(states)
    times: dict[str, float] = {}
    for label, forward_too in (("bf16", None), ("fp8 backward", False), ("fp8", True)):
        torch._dynamo.reset()
        with torch.device("cuda"):
            layer, norm = GatedMLP(HIDDEN, WIDE).bfloat16(), RMSNorm(HIDDEN, 1e-6).bfloat16()
        rounded = []
        for name, linear in list(layer.named_children()):
            assert isinstance(linear, nn.Linear)
            if forward_too is not None:
                rounded.append(Fp8Linear(layer.get_parameter(f"{name}.weight"), forward_too=forward_too))
                setattr(layer, name, rounded[-1])

        def refresh(layers: list[Fp8Linear] = rounded) -> None:
            for one in layers:
                one.refresh()

        def forward(block: Tensor, layer: GatedMLP = layer, norm: RMSNorm = norm) -> Tensor:
            return block + layer(norm(block))

        wanted = [states, *layer.parameters(), *norm.parameters()]
        compiled = torch.compile(forward, fullgraph=True, dynamic=False)
        with torch.no_grad():
            compiled_refresh = torch.compile(refresh, fullgraph=True, dynamic=False)
            compiled_refresh()
            times[f"{label}, rounding weights"] = milliseconds(compiled_refresh) if rounded else 0.0
        times[label] = milliseconds(lambda c=compiled, w=wanted: torch.autograd.grad(c(states), w, direction))
    return {"mlp of one layer": times}


def head() -> Times:
    """A chunk of the loss with gradient, compiled, with a plain and a rounded head."""
    import torch

    from drafter_trainer.fp8 import Fp8Head
    from drafter_trainer.objectives import SlotInput, slot_statistics
    from slipstream.run_spec.objective import CROSS_ENTROPY

    weight = 0.02 * torch.randn(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(HEAD_ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, VOCABULARY, (HEAD_ROWS,), device="cuda")
    weights = torch.rand(HEAD_ROWS, device="cuda")
    times: dict[str, float] = {}
    gradients = []
    for label, frozen in (("bf16", weight), ("fp8", Fp8Head.of(weight))):
        torch._dynamo.reset()

        def chunk(frozen: Any = frozen) -> Any:
            slots = slot_statistics(SlotInput(hidden, labels, None), frozen, None, {CROSS_ENTROPY: 1.0}, 3.0)
            return slots.cost.sum(), weights[:, None] * slots.gradient

        compiled = torch.compile(chunk, fullgraph=True, dynamic=False)
        times[label] = milliseconds(compiled)
        gradients.append(compiled()[1].double().flatten())
    times["cosine of the gradients"] = float(torch.cosine_similarity(gradients[0], gradients[1], dim=0))
    return {f"head, {HEAD_ROWS} rows": times}


PART_FUNCTIONS: dict[str, Callable[[], Times]] = {"products": products, "mlp": mlp, "head": head}


def rows_of(found: dict[str, Times]) -> list[Row]:
    """bfloat16's time ÷ FP8's: of every product without casts, of MLP and head with everything."""
    rows = []
    for name, times in found.get("products", {}).items():
        for what in ("forward", "dx", "dW"):
            if (plain := times.get(f"{what}, bf16")) is not None:
                fast = times[f"{what}, fp8 fast"]
                rows.append(Row(f"{name}, {what}", "product alone", "ms", fast, plain, "bfloat16", plain / fast))
    for part in ("mlp", "head"):
        for name, times in found.get(part, {}).items():
            plain, ours = times["bf16"], times["fp8"]
            rows.append(Row(name, "forward and backward", "ms", ours, plain, "bfloat16", plain / ours))
    return rows


def table(found: dict[str, Times], failed: dict[str, str]) -> list[str]:
    """What a person reads."""
    lines = []
    for times in found.values():
        for name, measured in times.items():
            lines.append(name)
            lines += [f"    {what:32s} {value:9.4f}" for what, value in measured.items()]
    return lines + [f"FAILED {part}: {why}" for part, why in failed.items()]


if __name__ == "__main__":
    sys.exit(main())
