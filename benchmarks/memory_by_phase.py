"""Memory of a training step, phase by phase, beside what slipstream.plan predicts; and what a checkpoint's copy costs.

    python -m benchmarks.memory_by_phase --out DIR [--sizes C A B] [--leave-by 200]

Every size is built and warmed up in a process of its own, as a trainer does it. A phase that is off by more than 10 %
is marked.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.results_file import Row, write_results

MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["C", "A", "B"])
    parser.add_argument("--leave-by", type=float, default=200.0, help="seconds from now; what is left then is left out")
    parser.add_argument("--commit", help="for machines without the repository")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        sys.stdout.write("\n" + json.dumps(measure(args.worker)) + "\n")
        return 0
    if args.out is None:
        parser.error("--out is missing")
    return run_all(args)


def run_all(args: argparse.Namespace) -> int:
    """One process per size; a size that fails or comes too late leaves the others whole."""
    args.out.mkdir(parents=True, exist_ok=True)
    deadline, rows, raw = time.monotonic() + args.leave_by, [], {}
    for size in args.sizes:
        left = deadline - time.monotonic()
        if left < 20:
            sys.stdout.write(f"size {size}: left out, {left:.0f} s are left\n")
            continue
        try:
            raw[size] = in_own_process(size, args.out / f"memory_{size}.log", left)
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            sys.stdout.write(f"size {size} failed: {error}; see {args.out}/memory_{size}.log\n")
            continue
        rows += rows_of(size, raw[size])
        sys.stdout.write(table_of(size, raw[size]))
    if not rows:
        return 1
    write_results("memory_by_phase", rows, commit=args.commit, extra={"raw": raw}, directory=args.out)
    return 0


def in_own_process(size: str, log: Path, timeout: float) -> dict[str, Any]:
    """What `measure` returns."""
    with log.open("wb") as stderr:
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory_by_phase", "--worker", size],
            stdout=subprocess.PIPE,
            stderr=stderr,
            timeout=timeout,
            check=True,
        )
    result: dict[str, Any] = json.loads(child.stdout.decode().strip().splitlines()[-1])
    return result


def measure(name: str, on: str = "cuda:0") -> dict[str, Any]:
    """In this process: build, warm up, three steps, one copy of the state. `name`: of a size; with `+fp8` in FP8."""
    import torch

    from benchmarks.peers.ours import OurSide
    from benchmarks.peers.workload import SIZES, drafter_config, make_pack, run_spec
    from drafter_trainer.checkpoint_writer import HostCopy
    from slipstream.plan.memory import expected_in_warm_up, plan_memory
    from slipstream.plan.sizes import RunSizes, TargetSizes

    label, fp8 = name.removesuffix("+fp8"), name.endswith("+fp8")
    size, device = SIZES[label], torch.device(on)
    began = time.monotonic()
    side = OurSide(size, device, fp8=fp8)
    meter = side.training_step.memory
    meter.close()
    built = time.monotonic() - began
    pack = make_pack(size, device, 0, split_features=True)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        side.step(pack)
    side.last_loss()
    free, total = torch.cuda.mem_get_info()
    config, spec = drafter_config(size), run_spec(size, device, fp8=fp8)
    facts = TargetSizes(
        *(config.num_target_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads),
        *(config.num_key_value_heads, config.head_dim, config.vocab_size, size.tied),
    )
    sizes = replace(RunSizes.of(spec, facts), num_features=config.num_features)
    plan = plan_memory(sizes, torch.cuda.get_device_properties(device).total_memory)
    optimizer = side.training_step.optimizer
    state = {"drafter": optimizer.deployed_weights(), "optimizer": optimizer.state_tensors()}
    return {
        "build_seconds": built,
        "measured": meter.peaks(),
        "expected": expected_in_warm_up(sizes, plan),
        "plan": {"held": dict(plan.held), "phases": {k: dict(v) for k, v in plan.phases.items()}},
        "steps": {
            "allocated_peak": torch.cuda.max_memory_allocated(),
            "allocated_between": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "reserved_in_warm_up": meter.largest_reserved,
            "card_used": total - free,
        },
        "checkpoint": time_copy(HostCopy, state),
    }


def time_copy(host_copy: Any, state: Any) -> dict[str, float]:
    """Seconds: to page-lock the memory, that the training thread is held up, until the copy is complete."""
    import torch

    began = time.monotonic()
    copy = host_copy(state)
    locked = time.monotonic()
    copy.take(state)
    copy.wait()
    torch.cuda.synchronize()
    began_again = time.monotonic()
    copy.take(state)
    held_up = time.monotonic()
    copy.wait()
    return {
        "bytes": sum(tensor.nbytes for group in state.values() for tensor in group.values()),
        "page_lock_seconds": locked - began,
        "blocked_seconds": held_up - began_again,
        "copy_seconds": time.monotonic() - began_again,
    }


def rows_of(size: str, raw: dict[str, Any]) -> list[Row]:
    """Predicted ÷ measured: above 1, the plan is careful."""
    rows = [
        Row(
            f"size {size}",
            f"peak of {phase}",
            "MiB",
            peak / MIB,
            raw["expected"][phase] / MIB,
            "plan",
            raw["expected"][phase] / peak,
        )
        for phase, peak in raw["measured"].items()
    ]
    copy = raw["checkpoint"]
    return [
        *rows,
        Row(f"size {size}", "a checkpoint holds up the training thread", "ms", copy["blocked_seconds"] * 1e3),
    ]


def table_of(size: str, raw: dict[str, Any]) -> str:
    """For the log's end."""
    lines = [f"size {size}: built and warmed up in {raw['build_seconds']:.0f} s; MiB measured, predicted"]
    for phase, peak in raw["measured"].items():
        expected = raw["expected"][phase]
        mark = "" if abs(peak - expected) <= 0.1 * expected else "   more than 10 % off"
        lines.append(f"  {phase:10} {peak / MIB:9.0f} {expected / MIB:9.0f} {peak / expected - 1:+7.1%}{mark}")
    lines += [f"  {name:20} {value / MIB:9.0f} MiB" for name, value in raw["steps"].items()]
    copy = raw["checkpoint"]
    lines.append(
        f"  checkpoint of {copy['bytes'] / MIB:.0f} MiB: page-locked in {copy['page_lock_seconds']:.2f} s, "
        f"thread held up {copy['blocked_seconds'] * 1e3:.1f} ms, copied in {copy['copy_seconds']:.3f} s"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
