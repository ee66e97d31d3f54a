"""Which tiles and options does compiled flex_attention run fastest with, on the trainer's mask?

    python -m benchmarks.attention_options --size A --out DIR --leave-by 300

Every option in a process of its own: one that does not compile, or asks for too much shared memory, says so in its row.
Results must agree with the default's: projections of output and gradients on fixed directions are compared. The flash
backend is flash-attn 4's (`pip install --pre "flash-attn-4[cu13]"`).
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results_file import RESULTS, Row, write_results

if TYPE_CHECKING:
    from benchmarks.peers.workload import Pack, Size

REPEATED, UNMASKED, UNCHECKED = "repeated", "unmasked", "unchecked"
_BACKWARD_64 = {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "flash-attn 4": {"BACKEND": "FLASH", UNCHECKED: True},
    # A program of the backward walks all query heads of its key head: the first keys of a long document, which every
    # query sees, are then the work of few programs, and the last of these ends long after all others.
    "keys repeated x2": {REPEATED: 2},
    "keys repeated for every head": {REPEATED: 0},
    "backward: 64 keys a program": _BACKWARD_64,
    "repeated, 64 keys a program": {REPEATED: 0, **_BACKWARD_64},
    "backward: 64 keys, 4 warps": {**_BACKWARD_64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64, "bwd_num_warps": 4},
    "bound: listed tiles unmasked": {UNMASKED: True},
    "prescaled queries": {"PRESCALE_QK": True},
    "backward: 2 stages": {"bwd_num_stages": 2},
    "forward 128x128": {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_stages": 2, "fwd_num_warps": 8},
    "forward: 4 warps": {"fwd_num_warps": 4},
    "forward: 64 keys, 4 warps": {"fwd_BLOCK_N": 64, "fwd_num_warps": 4},
    "forward: 64 keys, 8 warps": {"fwd_BLOCK_N": 64, "fwd_num_warps": 8},
    "forward: 64 queries": {"fwd_BLOCK_M": 64, "fwd_num_warps": 4},
    "forward: 8 warps": {"fwd_num_warps": 8},
    "descriptors (TMA)": {"USE_TMA": True},
}
"""Of the kernel, but for `REPEATED`: how often keys and values are repeated before it, 0 for once a query head; and
`UNMASKED`: every element of a listed tile is seen, which is wrong and shows what the mask function costs; and
`UNCHECKED`: the mask function reads its intervals at any row it is asked for, because torch 2.11 cannot translate a
minimum for that backend (sizes are whole tiles here, so no row lies past the end)."""
STEPS = 20
TOLERANCE = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="A")
    parser.add_argument("--only", action="append", default=[], choices=OPTIONS, help="an option; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--leave-by", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--commit")
    parser.add_argument("--worker", metavar="OPTION")
    args = parser.parse_args()
    if args.worker:
        sys.stdout.write("\n" + json.dumps(measure(args.size, OPTIONS[args.worker])) + "\n")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.leave_by
    found: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(OPTIONS):
        if args.only and name not in ("default", *args.only):
            continue
        left = deadline - time.monotonic()
        found[name] = in_own_process(args, name, number, left) if left > 20 else {"failed": "no time left"}
        sys.stdout.write(line_of(name, found[name], found["default"]) + "\n")
        sys.stdout.flush()
    default = found["default"]
    rows = [
        Row(f"{args.size}, {name}", f"{part} of one layer", "ms", result[part], default[part], "default")
        for name, result in found.items()
        for part in ("forward", "backward")
        if part in result and part in default
    ]
    if not rows:
        return 1
    write_results("attention_options", rows, commit=args.commit, extra={"raw": found}, directory=args.out)
    return 0


def in_own_process(args: argparse.Namespace, name: str, number: int, timeout: float) -> dict[str, Any]:
    """What `measure` returns, or why it does not."""
    log = args.out / f"attention_options_{number}.log"
    command = [sys.executable, "-m", "benchmarks.attention_options", "--size", args.size, "--worker", name]
    try:
        with log.open("wb") as stderr:
            child = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, timeout=timeout, check=True)
    except subprocess.SubprocessError as error:
        return {"failed": f"{type(error).__name__}, see {log}"}
    result: dict[str, Any] = json.loads(child.stdout.decode().strip().splitlines()[-1])
    return result


def measure(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Median milliseconds of one layer's attention, forward and backward, on the mask of a pack of this size."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    from benchmarks.peers.workload import SIZES, make_pack
    from drafter_trainer.block_mask import TILE, AttentionLayout, build_block_attention
    from drafter_trainer.flex_policy import compile_owned, configure_compiler

    size, device = SIZES[name], torch.device("cuda", 0)
    configure_compiler()
    pack = make_pack(size, device, 0, split_features=True)
    layout = AttentionLayout("flex", size.block_size)
    mask = build_block_attention(layout, pack.anchors, pack.tensors["position_ids"]).full
    assert isinstance(mask, BlockMask)
    queries, keys = mask.seq_lengths
    assert queries % TILE == keys % TILE == 0
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int, length: int) -> torch.Tensor:
        # As the drafter's: heads lie beside one another in a row.
        rows = torch.randn(1, length, heads, size.head_dim, device=device, generator=generator, dtype=torch.bfloat16)
        return rows.transpose(1, 2)

    inputs = [draw(size.heads, queries), draw(size.kv_heads, keys), draw(size.kv_heads, keys)]
    inputs = [inputs[0].requires_grad_(), *(tensor.contiguous().requires_grad_() for tensor in inputs[1:])]
    direction = draw(size.heads, queries)
    kernel: Any = {name: value for name, value in options.items() if name not in (REPEATED, UNMASKED, UNCHECKED)}
    if UNMASKED in options:
        mask.mask_mod = lambda _batch, _head, query, _key: query >= 0
    if UNCHECKED in options:
        mask.mask_mod = unchecked_mask(pack, size)
    repeats = options.get(REPEATED, 1) or size.heads // size.kv_heads

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=kernel)

    compiled = compile_owned(attend, name="attention", graphs=1)
    forward, backward, output, gradients = steps(compiled, inputs, direction)
    return {
        "forward": statistics.median(forward),
        "backward": statistics.median(backward),
        "projections": [
            [float(tensor.float().norm()), float((tensor.float() * draw_like(tensor)).sum())]
            for tensor in (output, *gradients)
        ],
    }


def steps(compiled: Any, inputs: list[Any], direction: Any) -> tuple[list[float], list[float], Any, tuple[Any, ...]]:
    """Milliseconds of each forward and of each backward; output and gradients of the last."""
    import torch

    forward: list[float] = []
    backward: list[float] = []
    for _ in range(STEPS + 3):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        output = compiled(*inputs)
        events[1].record()
        gradients = torch.autograd.grad(output, inputs, direction)
        events[2].record()
        torch.cuda.synchronize()
        for times, (begin, end) in zip((forward, backward), itertools.pairwise(events), strict=True):
            times.append(begin.elapsed_time(end))
    return forward[3:], backward[3:], output, gradients


def unchecked_mask(pack: "Pack", size: "Size") -> Any:
    """The trainer's mask function without its guard against rows past the end."""
    from drafter_trainer.block_mask import visible_intervals

    visible = visible_intervals(pack.anchors, pack.tensors["position_ids"], size.block_size)

    def mask_mod(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        in_context = (key >= visible.context_start[query]) & (key < visible.context_end[query])
        block_key = key - size.tokens
        return in_context | ((block_key >= visible.block_start[query]) & (block_key < visible.block_end[query]))

    return mask_mod


def draw_like(tensor: Any) -> Any:
    """A fixed direction of the tensor's shape, whose product with it is about as large as its norm."""
    import torch

    generator = torch.Generator(tensor.device).manual_seed(1)
    return torch.randn(tensor.shape, device=tensor.device, generator=generator)


def line_of(name: str, result: dict[str, Any], default: dict[str, Any]) -> str:
    """For people."""
    if "failed" in result:
        return f"{name:<28} {result['failed']}"
    agrees = (
        ""
        if "failed" in default or UNMASKED in OPTIONS[name] or agree(result, default)
        else "   WRONG: differs from the default's result"
    )
    return f"{name:<28} forward {result['forward']:7.3f} ms   backward {result['backward']:7.3f} ms{agrees}"


def agree(result: dict[str, Any], default: dict[str, Any]) -> bool:
    """Whether norms and projections are the default's, within a share of the norm."""
    pairs = zip(result["projections"], default["projections"], strict=True)
    return all(abs(a - b) <= TOLERANCE * theirs[0] for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    sys.exit(main())
