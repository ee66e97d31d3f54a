"""Peak memory of a training process on a CPU, beside what slipstream.plan predicts, over many shapes of a run.

    python -m benchmarks.memory_on_cpu [--out DIR] [--shapes NAME …] [--leave-by 900]

Every shape is a process of its own that holds what a trainer holds: the frozen tables, drafter and optimizer, packs
ready, a checkpoint's copy, held-out packs. It trains a few steps and copies its state between two of them. What is
compared is the kernel's high-water mark of the process. Off by more than 10 % is marked; the exit status is 1 where so
much more was needed, for then a run that was admitted could be killed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS, Row, write_results

MIB = 1 << 20
ALLOWED = 0.10
STEPS = 4
HEAD_DIM = 64


@dataclass(frozen=True)
class Shape:
    """A run on a CPU; `again`: layers that are computed again."""

    hidden: int
    layers: int
    anchors: int
    block: int
    tokens: int
    vocab: int = 49_152
    again: int = 0
    ema: bool = False
    optimizer: str = "adamw"
    objective: str = "cross_entropy"
    heldout_packs: int = 0


SHAPES = {
    "64, many anchors": Shape(64, 1, 256, 16, 1024, vocab=4096),
    "64, more anchors": Shape(64, 5, 512, 8, 512, vocab=4096),
    "256, again": Shape(256, 4, 128, 8, 1024, vocab=4096, again=4),
    "256, again, long": Shape(256, 5, 128, 16, 2048, again=5),
    "256, average": Shape(256, 2, 64, 16, 2048, ema=True),
    "576, Muon": Shape(576, 2, 48, 8, 512, optimizer="muon"),
    "576, long packs": Shape(576, 5, 16, 16, 4096),
    "576, some again": Shape(576, 5, 128, 8, 1024, again=3),
    "576, all again": Shape(576, 5, 256, 8, 2048, again=5),
    "576, large blocks": Shape(576, 2, 512, 16, 512, vocab=4096),
    "576, kl": Shape(576, 2, 64, 8, 512, objective="kl"),
    "576, held-out": Shape(576, 2, 64, 8, 1024, heldout_packs=10),
    "576, small": Shape(576, 2, 48, 8, 512),
    "960, one layer": Shape(960, 1, 64, 8, 1024),
    "960, again, average": Shape(960, 3, 64, 16, 512, again=3, ema=True),
}
"""By hidden size, and what is special."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--leave-by", type=float, default=900.0, help="seconds from now; what is left then is left out")
    parser.add_argument("--commit", help="for machines without the repository")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        sys.stdout.write("\n" + json.dumps(measure(Shape(**json.loads(args.worker)))) + "\n")
        return 0
    return run_all(args)


def run_all(args: argparse.Namespace) -> int:
    """One process per shape; one that fails or comes too late leaves the others whole."""
    deadline, raw = time.monotonic() + args.leave_by, {}
    for name in args.shapes:
        left = deadline - time.monotonic()
        if left < 30:
            sys.stdout.write(f"{name}: left out, {left:.0f} s are left\n")
            continue
        try:
            raw[name] = in_own_process(SHAPES[name], left)
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            sys.stdout.write(f"{name} failed: {error}\n")
            continue
        sys.stdout.write(line_of(name, raw[name]) + "\n")
        sys.stdout.flush()
    if not raw:
        return 1
    shapes = {name: asdict(SHAPES[name]) for name in raw}
    write_results(
        "memory_on_cpu", rows_of(raw), commit=args.commit, extra={"shapes": shapes, "raw": raw}, directory=args.out
    )
    sys.stdout.write("\n".join(("", *(line_of(name, one) for name, one in raw.items()), "")))
    return int(
        len(raw) < len(args.shapes) or any(one["measured"] > (1 + ALLOWED) * one["predicted"] for one in raw.values())
    )


def in_own_process(shape: Shape, timeout: float) -> dict[str, Any]:
    """What `measure` returns."""
    command = [sys.executable, "-m", "benchmarks.memory_on_cpu", "--worker", json.dumps(asdict(shape))]
    child = subprocess.run(command, stdout=subprocess.PIPE, timeout=timeout, check=True)
    result: dict[str, Any] = json.loads(child.stdout.decode().strip().splitlines()[-1])
    return result


def measure(shape: Shape) -> dict[str, Any]:
    """In this process: what a trainer makes before its first step, then steps; bytes."""
    import torch

    import drafter_trainer.start  # noqa: F401 - all that a trainer loads
    from benchmarks.peers.workload import drafter_config, frozen_weights, make_pack
    from drafter_trainer.checkpoint_writer import HostCopy
    from drafter_trainer.safetensors_file import write_safetensors
    from drafter_trainer.step import TrainingStep
    from drafter_trainer.training_packs import StepBatch, TrainingPack
    from slipstream.machine_probe import peak_resident_bytes
    from slipstream.wire.tensor_names import LAST_HIDDEN_STATE

    device, size, spec, plan = torch.device("cpu"), size_of(shape), spec_of(shape), planned(shape)
    step = TrainingStep(drafter_config(size), frozen_weights(size, device), spec)
    step.load_weights(step.first_weights(0))
    state = {"drafter": step.optimizer.deployed_weights(), "optimizer": step.optimizer.state_tensors()}
    copy = HostCopy(state)

    def pack(number: int) -> TrainingPack:
        made = make_pack(size, device, number, split_features=True)
        # Copies: the tensors of a made pack are parts of a larger one.
        tensors = {name: tensor.clone() for name, tensor in made.tensors.items()}
        if spec.loss.needs_target_distribution:
            tensors[LAST_HIDDEN_STATE] = tensors["input_ids"][:, None].expand(-1, shape.hidden).float().contiguous()
        return TrainingPack(number, tensors, made.anchors)

    heldout = [pack(number) for number in range(shape.heldout_packs)]
    ready = [pack(number) for number in range(spec.stream.prefetch_packs + 1)]
    began = time.process_time()
    for number in range(STEPS):
        step.run(StepBatch(number, (ready[number % len(ready)],)), 1e-5).wait()
        if number == 1:
            with tempfile.TemporaryDirectory() as directory:
                write_safetensors(Path(directory) / "state", copy.take(state)["optimizer"])
            for one in heldout:
                step.matched(one)
    return {
        "measured": peak_resident_bytes(),
        "predicted": plan.peak_bytes,
        "step_cpu_seconds": (time.process_time() - began) / STEPS,
        "worst_phase": plan.worst_phase,
        "held": dict(plan.held),
        "phase": dict(plan.phases[plan.worst_phase]),
        "outside": dict(plan.outside),
    }


def size_of(shape: Shape) -> Any:
    """Of a shape, as the packs are made for it."""
    from benchmarks.peers.workload import Size

    heads = shape.hidden // HEAD_DIM
    return Size(
        "cpu",
        *(shape.hidden, heads, max(1, heads // 3), HEAD_DIM, shape.hidden * 8 // 3, shape.vocab, 30, (1, 2, 3, 4, 5)),
        tied=True,
        tokens=shape.tokens,
        anchors=shape.anchors,
        block_size=shape.block,
        documents=2,
        layers=shape.layers,
    )


def spec_of(shape: Shape) -> Any:
    """The recipe of a shape."""
    import torch

    from benchmarks.peers.workload import run_spec
    from slipstream.run_spec.spec import RunSpec

    size = size_of(shape)
    recipe = run_spec(size, torch.device("cpu"), activation_checkpointing=shape.again or False).model_dump()
    recipe["target"]["dtype"] = "float32"
    recipe["drafter"]["target_layer_ids"] = size.target_layer_ids
    recipe["optimizer"] |= {"kind": shape.optimizer, "ema_decay": 0.99 if shape.ema else None}
    recipe["loss"]["objective"] = shape.objective
    recipe["eval"]["heldout"] = "answers.jsonl" if shape.heldout_packs else None
    return RunSpec.model_validate(recipe)


def planned(shape: Shape) -> Any:
    """The plan of a shape's memory."""
    from slipstream.plan.memory import plan_memory
    from slipstream.plan.sizes import RunSizes, TargetSizes

    size = size_of(shape)
    facts = TargetSizes(
        *(size.target_layers, size.hidden, size.intermediate, size.heads, size.kv_heads, size.head_dim, size.vocab),
        size.tied,
    )
    sizes = RunSizes.of(spec_of(shape), facts)
    return plan_memory(replace(sizes, heldout_tokens=shape.heldout_packs * shape.tokens), 0)


def rows_of(raw: dict[str, Any]) -> list[Row]:
    """Predicted ÷ measured: above 1, the plan is careful."""
    return [
        Row(
            name,
            "the plan ÷ the peak of the process",
            "MiB",
            one["measured"] / MIB,
            one["predicted"] / MIB,
            "plan",
            one["predicted"] / one["measured"],
            floor=round(1 / (1 + ALLOWED), 3),
        )
        for name, one in raw.items()
    ]


def line_of(name: str, one: dict[str, Any]) -> str:
    """For people."""
    share = one["measured"] / one["predicted"]
    mark = "" if abs(share - 1) <= ALLOWED else "   more than 10 % off"
    measured, predicted = (one[which] / MIB for which in ("measured", "predicted"))
    return f"{name:24} measured {measured:6.0f}  predicted {predicted:6.0f} MiB  {share:6.1%}{mark}"


if __name__ == "__main__":
    sys.exit(main())
