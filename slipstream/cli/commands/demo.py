"""`slipstream demo`: train a drafter for a small real model on this machine, and decode with it. Minutes, no network.

Target server, trainer and evaluation are the same processes that a real run uses; the demo only starts them.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.child_processes import child_process, exit_status, one_gpu, sigterm_as_exit
from slipstream.cli.demo_report import DemoResult, print_summary, summarise, write_summary
from slipstream.errors import SlipstreamError
from slipstream.machine_probe import probe_accelerator, usable_cores
from slipstream.packaged_model import MODEL_PACKAGE, RECIPE, given_model, packaged_model
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec

MARKER = ".slipstream-demo"
"""Only a directory that holds this file is ever emptied."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("demo", help="train a drafter for SmolLM2-135M here, in minutes, and decode with it")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("demo"),
        help="where everything goes; an earlier demo there is replaced (default: demo)",
    )
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
        SlipstreamError: the model is missing, one of the processes failed (with the end of its log), or NOT_LOSSLESS,
            decoding with the drafter changed an output; the summary is written all the same.
    """
    with sigterm_as_exit():
        plan = make_plan(args)
        _announce(plan)
        prepare_directory(plan.directory)
        started = time.monotonic()
        train(plan)
        report = evaluate(plan)
        seconds = time.monotonic() - started
    model = Path(plan.spec.target.model).name
    metrics = plan.run_directory / "metrics.jsonl"
    summary = summarise(DemoResult(model, plan.device_name, metrics, report, seconds))
    path = plan.directory / "summary.json"
    write_summary(path, summary)
    print_summary(summary, report, path)
    if not summary["lossless"]:
        raise SlipstreamError(
            "decoding with the drafter changed an output by more than rounding explains (see the evaluation above)",
            reason=Reason.NOT_LOSSLESS,
            remedy=f"This is a defect of decoding: please report it with {plan.directory / 'eval.json'}.",
        )
    return 0


def make_plan(args: argparse.Namespace) -> Plan:
    """Decide model, device and threads before anything starts or is removed.

    Raises:
        SlipstreamError: MODEL_INVALID, no model; SPEC_INVALID, an override; PATH_NOT_ALLOWED, the directory holds
            something that is not a demo.
    """
    from recipes import recipe_path

    directory = args.directory.resolve()
    _require_replaceable(directory)
    accelerator = probe_accelerator()
    overrides = [f"target.model={given_model(args.model) if args.model else packaged_model()}"]
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


def prepare_directory(directory: Path) -> None:
    """Make the directory, or empty it if an earlier demo lies there.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, it is something else, or cannot be written.
    """
    _require_replaceable(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # First, and never removed: after an interrupted start the directory is still known as a demo's.
        (directory / MARKER).write_text("slipstream demo empties this directory when it starts.\n", encoding="utf-8")
        for entry in directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != MARKER:
                entry.unlink()
    except OSError as error:
        raise _refused(f"{error.filename or directory} cannot be written: {error.strerror}") from error


def _require_replaceable(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise _refused(f"{directory} is not a directory")
    try:
        foreign = directory.exists() and any(directory.iterdir()) and not (directory / MARKER).is_file()
    except OSError as error:
        raise _refused(f"{directory} cannot be read: {error.strerror}") from error
    if foreign:
        raise _refused(f"{directory} exists and is no earlier demo (it holds no {MARKER})")


def _refused(message: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.PATH_NOT_ALLOWED, remedy="Choose another place with --directory.")


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
    with _process(plan, server_command, plan.target_threads, logs / "target-server.log") as server:
        address = _wait_for_address(server, port_file, logs / "target-server.log")
        trainer_command = [
            *("drafter_trainer", "run", *plan.flags, "--target", address),
            *("--run-dir", str(plan.run_directory), "--threads", str(plan.trainer_threads)),
        ]
        # The trainer's own progress line is the demo's: its stderr is the user's terminal.
        with _process(plan, trainer_command, plan.trainer_threads) as trainer:
            _wait_for_trainer(trainer, server, logs / "target-server.log")


def evaluate(plan: Plan) -> dict[str, Any]:
    """Decode the held-out prompts before and after training; returns the report, lossless or not.

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
    with _process(plan, command, threads) as evaluation:
        status = exit_status(evaluation)
    # An output that is not lossless is a result too, and was written.
    not_lossless = SlipstreamError("", reason=Reason.NOT_LOSSLESS).exit_code
    if status not in (0, not_lossless):
        raise SlipstreamError(
            f"the evaluation ended with exit status {status}",
            reason=Reason.INTERNAL,
            remedy="Its message is above.",
        )
    report: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return report


def _announce(plan: Plan) -> None:
    sys.stderr.write(
        f"target {Path(plan.spec.target.model).name} and drafter on {plan.device_name}: "
        f"target server {plan.target_threads} threads, trainer {plan.trainer_threads} threads; "
        f"everything goes to {plan.directory}\n"
    )


def _data_roots(spec: RunSpec) -> list[str]:
    return sorted({str(Path(file).parent) for file in spec.data.files})


@contextmanager
def _process(
    plan: Plan, arguments: Sequence[str], threads: int, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m …` with its share of the cores and, where there are several GPUs, the first one."""
    environment = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if plan.device == "cuda":
        environment |= one_gpu()
    command = [sys.executable, "-m", *arguments]
    with (
        log.open("wb") if log else nullcontext() as file,
        child_process(command, environment=environment, output=file) as process,
    ):
        yield process


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
