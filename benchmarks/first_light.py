"""Target server and trainer as separate processes on one GPU, then decoding: the whole path, measured.

    python -m benchmarks.first_light --model SmolLM2-135M-Instruct --conversations C.jsonl.gz --prompts P.jsonl

A short run measures the speed first; the real one gets as many steps as take --train-seconds at that speed.

Baseline: SpecForge's DFlash with the target in its own process, 210 s on the same GPU, data and prompts: 49 k tokens/s,
mean accepted length (bonus included, greedy, 128 tokens, 12 prompts a source) 2.25 on GSM8K and 1.40 on HumanEval.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.results_file import Row, write_results
from benchmarks.served_training import Place, step_records, target_server
from slipstream.child_processes import child_process, exit_status, one_gpu, sigterm_as_exit

BASELINE = "SpecForge DFlash, target in process, 210 s, one H200"
BASELINE_TOKENS_PER_SECOND = 49_000.0
BASELINE_ACCEPTED = {"gsm8k": 2.25, "humaneval": 1.40}
TRAIN_SECONDS = 210.0
EVALUATION_SECONDS = 110.0
"""What --leave-by keeps for evaluation."""
CALIBRATION_SHARE = 0.96
"""Of the measured speed: the real run is a little slower, and has to end within --train-seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--recipe", default="recipes/smollm2-135m-1gpu.toml")
    parser.add_argument("--train-seconds", type=float, default=TRAIN_SECONDS)
    parser.add_argument("--calibration-steps", type=int, default=120)
    parser.add_argument("--leave-by", type=float, help="seconds from now; training is cut to leave time for evaluation")
    parser.add_argument("--jobs", type=int, default=1, help="processes that decode at once")
    parser.add_argument("--prompts-per-source", type=int, default=12)
    parser.add_argument("--work", type=Path, default=Path("first-light"))
    parser.add_argument("--commit", help="for machines without the repository")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    with sigterm_as_exit():
        return measure(args)


def measure(args: argparse.Namespace) -> int:
    """Train, evaluate, write the result."""
    args.work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    memory: dict[str, float] = {}
    note_memory(memory, "idle")
    place = Place(args.model, Path(args.recipe), "cuda", 0, tuple(overrides(args)[1::2]))
    with target_server(place, args.work, args.conversations.resolve().parent) as server:
        address = server.address
        speed = calibrate(args, address, memory)
        # The server keeps what its busiest moment needed, and now it is alone on the card.
        note_memory(memory, "server")
        seconds = args.train_seconds
        if args.leave_by:
            seconds = min(seconds, args.leave_by - (time.monotonic() - started) - EVALUATION_SECONDS)
        train(args, address, "run", max(1, int(seconds * speed * CALIBRATION_SHARE)), memory)
    report = evaluate(args)
    by_process = memory_by_process(memory)
    rows = make_rows(step_records(args.work / "run"), report, by_process)
    extra = {
        "settings": overrides(args),
        "evaluation": report["results"],
        "lossless": report["lossless"],
        "gpu_memory_in_use": memory or "not reported by the driver",
    }
    path = write_results("first_light", rows, commit=args.commit, extra=extra)
    sys.stdout.write(path.read_text())
    return 0


def overrides(args: argparse.Namespace) -> list[str]:
    """Recipe overrides, the same for server and trainer."""
    files = json.dumps([str(args.conversations.resolve())])
    items = (f"target.model={args.model}", f"data.files={files}", *args.set)
    return [word for item in items for word in ("--set", item)]


def calibrate(args: argparse.Namespace, address: str, memory: dict[str, float]) -> float:
    """Steps per second of a short run, its first half left out."""
    train(args, address, "calibration", args.calibration_steps, memory)
    records = step_records(args.work / "calibration")
    steady = records[len(records) // 2 :]
    return len(steady) / sum(record["seconds"] for record in steady)


def train(args: argparse.Namespace, address: str, name: str, max_steps: int, memory: dict[str, float]) -> None:
    """Run a trainer to the end of its run."""
    command = [sys.executable, "-m", "drafter_trainer", "run", args.recipe, *overrides(args)]
    command += ["--set", f"name={name}", "--set", f"train.max_steps={max_steps}", "--set", "train.max_tokens="]
    command += ["--target", address, "--run-dir", str(args.work / name)]
    with (
        (args.work / f"{name}.log").open("wb") as log,
        child_process(command, environment=one_gpu(), output=log) as trainer,
    ):
        while trainer.poll() is None:
            note_memory(memory, "both")
            time.sleep(2)
    if trainer.returncode != 0:
        raise SystemExit(f"trainer ended with {trainer.returncode}, see {log.name}")


def card_memory() -> float | None:
    """MiB in use on the visible card, by all processes; None without a driver that says it.

    Containers often hide which process holds how much, so the benchmark takes differences of this instead.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command = ["nvidia-smi", f"--id={card}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    first = answer.stdout.strip().partition("\n")[0]
    return float(first) if first.isdigit() else None


def note_memory(memory: dict[str, float], phase: str) -> None:
    """Raise the maximum of a phase by what is in use now."""
    used = card_memory()
    if used is not None:
        memory[phase] = max(memory.get(phase, 0.0), used)


def memory_by_process(memory: dict[str, float]) -> dict[str, float]:
    """MiB of each process, CUDA context included, from the card's total in three phases."""
    if not memory.keys() >= {"idle", "server", "both"}:
        return {}
    return {"target server": memory["server"] - memory["idle"], "trainer": memory["both"] - memory["server"]}


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Decode the prompts with the trained drafter; returns the report."""
    output = args.work / "eval.json"
    command = [sys.executable, "-m", "drafter_trainer", "eval", str(args.work / "run")]
    command += ["--prompts", str(args.prompts), "--num-prompts", str(args.prompts_per_source)]
    command += ["--max-new-tokens", "128", "--device", "cuda", "--output", str(output), "--jobs", str(args.jobs)]
    output.unlink(missing_ok=True)
    with child_process(command, environment=one_gpu() | {"COLUMNS": "140"}) as evaluation:
        status = exit_status(evaluation)
    if not output.exists():
        raise SystemExit(f"the evaluation ended with {status}")
    report: dict[str, Any] = json.loads(output.read_text())
    return report


def make_rows(records: list[dict[str, Any]], report: dict[str, Any], memory: dict[str, float]) -> list[Row]:
    """The table of the closing note."""
    # The first step waits for the first pack of an idle server.
    steady = records[1:]
    seconds = sum(r["seconds"] for r in steady)
    speed = (steady[-1]["tokens"] - records[0]["tokens"]) / seconds
    waited = sum(r["data_wait_seconds"] for r in steady) / seconds
    case = f"SmolLM2-135M, {len(records)} steps, {seconds:.0f} s"
    rows = [
        Row(
            case,
            "trained tokens/s, padding included, ours ÷ baseline",
            "tokens/s",
            speed,
            BASELINE_TOKENS_PER_SECOND,
            BASELINE,
            ratio=speed / BASELINE_TOKENS_PER_SECOND,
            floor=1.0,
        ),
        Row(case, "share of the step spent waiting for data", "", waited),
        Row(case, "training seconds after warm-up", "s", seconds),
        *(Row(case, f"GPU memory of the {name}", "MiB", value) for name, value in memory.items()),
    ]
    for source, row in report["results"]["trained"].items():
        baseline = BASELINE_ACCEPTED.get(source)
        accepted = row["accepted_length"]
        if accepted is None:
            raise SystemExit(f"no answer to a prompt of {source} had a verification round")
        ratio = None if baseline is None else accepted / baseline
        metric = "accepted length, bonus included, ours ÷ baseline"
        name = BASELINE if baseline is not None else None
        floor = None if baseline is None else 1.0
        rows.append(
            Row(f"{source}, {row['prompts']} prompts", metric, "tokens", accepted, baseline, name, ratio, None, floor)
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
