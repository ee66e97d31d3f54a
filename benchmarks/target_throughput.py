"""How fast the target runs: our packed forward against transformers' own, and the server against the forward alone.

    python -m benchmarks.target_throughput --out DIR --leave-by 150

Weights are random, document lengths are real (benchmarks/document_lengths.json says whose). Each variant runs in a
process of its own; inside it, ours and transformers' take turns on the same weights. Baseline: transformers' decoder
with output_hidden_states and its default attention, without the head; documents in batches of eight, in random order,
padded to the longest. The server is asked for packs by a trainer's own feeder, which copies them to the same device.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS, Row, spread, write_results
from benchmarks.target_workload import SHAPES
from slipstream.child_processes import child_process, one_gpu, sigterm_as_exit

BASELINE = "transformers, output_hidden_states=True, same weights, same process"
FLOORS: dict[tuple[str, str], tuple[float, float | None]] = {
    ("qwen3-8b", "even"): (1.4, 1.6),
    ("qwen3-8b", "real"): (2.2, 2.8),
    ("smollm2-135m", "real"): (4.0, 8.0),
    ("qwen3-8b", "serve"): (0.95, 0.98),
    ("smollm2-135m", "serve"): (0.8, None),
}
"""Floor and goal by shape and case."""
CASES = {
    "even": "8 x 1024 tokens",
    "real": "real document lengths",
}
NEEDED_SECONDS = {
    ("forward", "smollm2-135m"): 25.0,
    ("forward", "qwen3-8b"): 40.0,
    ("serve", "smollm2-135m"): 35.0,
    ("serve", "qwen3-8b"): 55.0,
}
"""With less time than this left a part is not begun; where nothing is said, `LEAST_SECONDS`."""
LEAST_SECONDS = 15.0
END_SECONDS = 5.0
"""Of the time given: for a worker that must be ended, and for what was measured to be written."""
GRACE_SECONDS = 2.0
WORKER_SECONDS = 240.0


def main() -> int:
    began = time.monotonic()  # `--leave-by` counts from here: to import torch takes ten seconds on some machines
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["smollm2-135m", "qwen3-8b"])
    parser.add_argument("--parts", nargs="+", choices=("forward", "serve"), default=["forward", "serve"])
    parser.add_argument("--compile", nargs="+", choices=("false", "true"), default=["true", "false"])
    parser.add_argument(
        "--leave-by", type=float, default=600.0, help="seconds from now, by when all is over; what is left out is said"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it, with --sizes tiny")
    parser.add_argument("--commit", help="for machines without the repository")
    args = parser.parse_args()
    if problem := _problem(args):
        parser.error(problem)
    args.out.mkdir(parents=True, exist_ok=True)
    answers: list[dict[str, Any]] = []
    with sigterm_as_exit():
        try:
            measure(args, began + args.leave_by - END_SECONDS, answers)
        finally:
            # Also when it is told to stop: what was measured is kept.
            rows = write(answers, args)
    return 0 if rows else 1


def write(answers: list[dict[str, Any]], args: argparse.Namespace) -> list[Row]:
    """Print the table and write the JSON of what there is; returns its rows."""
    rows = [row for answer in answers for row in rows_of(answer)]
    sys.stdout.write(table(rows, answers))
    if rows:
        extra = {"answers": answers, "settings": {key: str(value) for key, value in vars(args).items()}}
        path = write_results("target_throughput", rows, commit=args.commit, extra=extra, directory=args.out)
        sys.stdout.write(f"{path}\n")
    return rows


def _problem(args: argparse.Namespace) -> str | None:
    if args.device == "cpu":
        return None if args.sizes == ["tiny"] else "a CPU runs --sizes tiny only"
    import torch

    return None if torch.cuda.is_available() else "torch finds no GPU; try --device cpu --sizes tiny"


def measure(args: argparse.Namespace, deadline: float, answers: list[dict[str, Any]]) -> None:
    """Add the workers' answers, each with what it was asked; what failed or was left out says so."""
    for part in args.parts:
        # A server is measured one way: what is compiled says how much of the forward it keeps.
        for compiled in args.compile if part == "forward" else args.compile[:1]:
            for size in args.sizes:
                asked = {"what": part, "size": size, "compile": compiled}
                began = time.monotonic()
                answer = asked | ask(asked, args, deadline - began)
                answer["seconds"] = round(time.monotonic() - began, 1)
                answers.append(answer)
                said = answer.get("failed", "done")
                sys.stderr.write(f"{part} {size} compile={compiled}: {said} after {answer['seconds']} s\n")


def ask(asked: dict[str, str], args: argparse.Namespace, seconds_left: float) -> dict[str, Any]:
    """Run one worker to its end."""
    needed = NEEDED_SECONDS.get((asked["what"], asked["size"]), LEAST_SECONDS)
    if seconds_left < needed:
        return {"failed": f"left out: it needs {needed:.0f} s, {max(seconds_left, 0.0):.0f} s are left"}
    name = f"target_throughput-{asked['what']}-{asked['size']}-{asked['compile']}"
    output, log = args.out / f"{name}.json", args.out / f"{name}.log"
    command = [sys.executable, "-m", "benchmarks.target_throughput_worker", asked["what"]]
    command += ["--size", asked["size"], "--compile", asked["compile"], "--device", args.device]
    command += ["--output", str(output)]
    output.unlink(missing_ok=True)
    with log.open("wb") as file, child_process(command, environment=one_gpu(), output=file) as worker:
        try:
            worker.wait(min(seconds_left, WORKER_SECONDS))
        except subprocess.TimeoutExpired:
            # It removes its shared memory at once, but takes its time to give the device's memory back.
            worker.terminate()
            with suppress(subprocess.TimeoutExpired):
                worker.wait(GRACE_SECONDS)
            worker.kill()
            return {"failed": f"left out: not done within {min(seconds_left, WORKER_SECONDS):.0f} s, see {log.name}"}
    if not output.exists():
        return {"failed": f"ended with {worker.returncode}, see {log.name}"}
    answer: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return answer


def rows_of(answer: dict[str, Any]) -> list[Row]:
    """The rows that one worker's answer gives."""
    size = answer["size"]
    how = "compiled" if answer["compile"] == "true" else "not compiled"
    title = f"{SHAPES[size].title}, {how}"
    if "failed" in answer:
        return []
    if answer["what"] == "serve":
        alone = answer["forward"]["packs_per_second"]
        rate, base = answer["packs_per_second"], statistics.median(alone)
        floor, goal = FLOORS.get((size, "serve"), (None, None))
        metric = "packs/s, server with one trainer's feeder ÷ forward alone"
        name = "forward alone, same process"
        case = f"{title}, served"
        return [Row(case, metric, "packs/s", rate, base, name, rate / base, spread(alone), floor, goal)]
    rows = []
    for case, words in CASES.items():
        ours, theirs = answer[case]["ours"], answer[case]["theirs"]
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        # A target is compiled wherever it can be: what it does otherwise is for comparison only.
        floor, goal = FLOORS.get((size, case), (None, None)) if answer["compile"] == "true" else (None, None)
        rows.append(
            Row(
                f"{title}, {words}",
                "useful tokens/s, ours ÷ transformers",
                "tokens/s",
                statistics.median(ours),
                statistics.median(theirs),
                BASELINE,
                statistics.median(ratios),
                spread(ratios),
                floor,
                goal,
            )
        )
    return rows


def table(rows: list[Row], answers: list[dict[str, Any]]) -> str:
    """Short, for people."""
    lines = []
    for row in rows:
        wanted = "" if row.floor is None else f"  floor {row.floor:g}" + (f", goal {row.goal:g}" if row.goal else "")
        assert row.ratio is not None and row.baseline is not None
        lines.append(
            f"{row.case:58} {row.ours:12,.1f} {row.baseline:12,.1f} {row.unit:9} ratio {row.ratio:5.2f}{wanted}"
        )
    for answer in answers:
        what = f"{answer['what']} {answer['size']} compile={answer['compile']}"
        if "failed" in answer:
            lines.append(f"{what}: {answer['failed']}")
        elif "launch_ms" in answer:
            launch = answer["launch_ms"]
            lines.append(
                f"{what}: a pack launched in {launch['launched']:.1f} ms, computed after {launch['computed']:.1f} ms; "
                f"compiled in {answer['compile_seconds']:.1f} s, recorded: {answer['recorded']}"
            )
        else:
            parts = (("engine", "engine"), ("its GPU", "gpu"), ("feeder", "feeder"), ("training thread", "training"))
            spent = "; ".join(f"{name} {in_words(answer[f'{key}_ms'])}" for name, key in parts)
            lines.append(f"{what}, ms per pack: {spent}; {answer['transport']}")
    return "\n".join(lines) + "\n"


def in_words(milliseconds: dict[str, float]) -> str:
    """Phases, longest first."""
    return ", ".join(f"{phase} {spent:g}" for phase, spent in sorted(milliseconds.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    sys.exit(main())
