"""Target server and trainer as separate processes on one GPU, then decoding: the whole path, measured.

    python -m benchmarks.first_light --model SmolLM2-135M-Instruct --conversations C.jsonl.gz --prompts P.jsonl \\
        --max-steps N

Baseline: SpecForge's DFlash with the target in its own process, 210 s on the same GPU, data and prompts: 49 k tokens/s,
mean accepted length (bonus included, greedy, 128 tokens, 12 prompts a source) 2.25 on GSM8K and 1.40 on HumanEval.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.results_file import Row, write_results

BASELINE = "SpecForge DFlash, target in process, 210 s, one H200"
BASELINE_TOKENS_PER_SECOND = 49_000.0
BASELINE_ACCEPTED = {"gsm8k": 2.25, "humaneval": 1.40}
TRAIN_SECONDS = 210.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--recipe", default="recipes/smollm2-135m-1gpu.toml")
    parser.add_argument("--max-steps", type=int, required=True, help=f"so many that training takes {TRAIN_SECONDS} s")
    parser.add_argument("--prompts-per-source", type=int, default=12)
    parser.add_argument("--work", type=Path, default=Path("first-light"))
    parser.add_argument("--commit", help="for machines without the repository")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    memory = train(args)
    report = evaluate(args)
    records = [json.loads(line) for line in (args.work / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = make_rows([r for r in records if "loss" in r], report, memory)
    extra = {"settings": overrides(args), "evaluation": report["results"], "lossless": report["lossless"]}
    path = write_results("first_light", rows, commit=args.commit, extra=extra)
    sys.stdout.write(path.read_text())
    return 0


def overrides(args: argparse.Namespace) -> list[str]:
    """Recipe overrides, the same for server and trainer."""
    files = json.dumps([str(args.conversations.resolve())])
    fixed = [f"target.model={args.model}", f"data.files={files}", f"train.max_steps={args.max_steps}"]
    return [word for item in (*fixed, *args.set) for word in ("--set", item)]


def train(args: argparse.Namespace) -> dict[str, float]:
    """Run server and trainer to the end of the run; returns the GPU memory by process, in MiB (largest seen)."""
    port_file = args.work / "target.port"
    port_file.unlink(missing_ok=True)
    serve = [sys.executable, "-m", "target_server", "serve", args.recipe, *overrides(args)]
    serve += ["--listen", "127.0.0.1:0", "--port-file", str(port_file), "--device", "cuda"]
    serve += ["--ledger", str(args.work / "ledger.sqlite"), "--data-root", str(args.conversations.resolve().parent)]
    memory: dict[str, float] = {"target server": 0.0, "trainer": 0.0}
    with subprocess.Popen(serve) as server:
        try:
            while not port_file.exists():
                if server.poll() is not None:
                    raise SystemExit(f"target server ended with {server.returncode}")
                time.sleep(0.2)
            port = port_file.read_text().strip().rpartition(":")[2]
            run = [sys.executable, "-m", "drafter_trainer", "run", args.recipe, *overrides(args)]
            run += ["--target", f"127.0.0.1:{port}", "--run-dir", str(args.work / "run")]
            with subprocess.Popen(run) as trainer:
                while trainer.poll() is None:
                    note_memory(memory, {server.pid: "target server", trainer.pid: "trainer"})
                    time.sleep(5)
            if trainer.returncode != 0:
                raise SystemExit(f"trainer ended with {trainer.returncode}")
        finally:
            server.terminate()
    return memory


def note_memory(memory: dict[str, float], names: dict[int, str]) -> None:
    """Raise the maxima by what the driver reports now."""
    answer = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in answer.stdout.splitlines():
        pid, _, mebibytes = line.partition(",")
        if pid.strip().isdigit() and int(pid) in names and mebibytes.strip().isdigit():
            name = names[int(pid)]
            memory[name] = max(memory[name], float(mebibytes))


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Decode the prompts with the trained drafter; returns the report."""
    output = args.work / "eval.json"
    command = [sys.executable, "-m", "drafter_trainer", "eval", str(args.work / "run"), "--target-model", args.model]
    command += ["--prompts", str(args.prompts), "--num-prompts", str(args.prompts_per_source)]
    command += ["--max-new-tokens", "128", "--device", "cuda", "--output", str(output)]
    status = subprocess.call(command, env={**os.environ, "COLUMNS": "140"})
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
            "trained tokens/s, ours ÷ baseline",
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
