"""Is the held-out estimate of the best checkpoint what decoding accepts, on every source?

    python3 -m benchmarks.heldout_estimate --model M --data FILE --prompts FILE

The target answers the prompts, a run of the shipped recipe trains on the data and measures eight checkpoints, and
`slipstream eval` decodes the prompts with the best one, in float32. Training is in the recipe's precision, so that the
target's text, its hidden states and the drafter's products are rounded otherwise than in decoding: the difference is
what that costs. `--device cpu --steps 16` tries it all out.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.results_file import Row, write_results
from benchmarks.served_training import (
    InterruptedTrainingError,
    Place,
    TrainerProcess,
    TrainingFailedError,
    missing_input,
    step_records,
    target_server,
)
from slipstream.child_processes import child_process, sigterm_as_exit

RECIPE = Path(__file__).parent.parent / "recipes" / "smollm2-135m-1gpu.toml"
CHECKPOINTS = 8
FLOOR = 0.95
"""Of the smaller by the larger of estimate and measured length."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, print, write."""
    args = parse(arguments)
    lacking = missing_input(args.model, [args.data, args.prompts], args.device, [0])
    if lacking:
        sys.stderr.write(f"{lacking}\n")
        return 2
    deadline = time.monotonic() + args.leave_by
    place = Place(
        model=args.model,
        recipe=RECIPE,
        device=args.device,
        gpu=0,
        settings=settings_of(args),
        stopped=lambda: time.monotonic() > deadline,
    )
    try:
        with sigterm_as_exit():
            rows, extra = measure(place, args)
    except (InterruptedTrainingError, TrainingFailedError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(table(rows))
    path = write_results("heldout_estimate", rows, extra=extra, directory=args.results)
    sys.stdout.write(f"{path}\n")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.heldout_estimate", description=__doc__)
    parser.add_argument("--model", required=True, help="SmolLM2: directory, hub name or .gguf")
    parser.add_argument("--data", type=Path, required=True, help="conversations to train on")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of prompts with their sources")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=1600, help="of training (default: %(default)s)")
    parser.add_argument("--num-prompts", type=int, default=30, help="of every source (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--leave-by", type=float, default=540.0, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--directory", type=Path, help="keeps logs and the run there; default: removed at the end")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


def settings_of(args: argparse.Namespace) -> tuple[str, ...]:
    """What the run changes in the recipe; `eval.heldout` comes with the directory."""
    return (
        f"data.files=[{json.dumps(str(args.data.absolute()))}]",
        f"eval.prompts={json.dumps(str(args.prompts.absolute()))}",
        f"eval.num_prompts={args.num_prompts}",
        f"eval.max_new_tokens={args.new_tokens}",
        "eval.dtype=float32",
        "train.max_tokens=",
        f"train.max_steps={args.steps}",
        f"checkpoint.every_steps={max(1, args.steps // CHECKPOINTS)}",
        *args.set,
    )


def measure(place: Place, args: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Answer, train, decode; the rows, and what explains them.

    Raises:
        TrainingFailedError, InterruptedTrainingError.
    """
    with TemporaryDirectory(prefix="heldout-estimate-") as temporary:
        directory = (args.directory or Path(temporary)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        heldout = directory / f"heldout-{args.device}.jsonl"
        named = f"eval.heldout={json.dumps(str(heldout))}"
        answering = ["target_server", "regenerate", str(RECIPE), "--heldout", *place.overrides(named)]
        answer_seconds = _run(
            place, [*answering, "--report", str(directory / "report.json")], directory / "answers.log"
        )
        with target_server(place, directory, Path("/")) as server:
            trainer = TrainerProcess(place, server, directory / "trainer", [*settings_of(args), named])
            with trainer:
                trainer.wait_until_ready()
                trainer.begin()
                trainer.wait()
        run = trainer.run_directory
        best = run / "checkpoints" / "best"
        decoding = ["drafter_trainer", "eval", str(best.resolve()), "--device", place.device]
        eval_seconds = _run(place, [*decoding, "--output", str(directory / "eval.json")], directory / "eval.log")
        state = json.loads((best / "state.json").read_text())
        measured = json.loads((directory / "eval.json").read_text())["results"]["trained"]
        records = step_records(run)
    lengths = {one["step"] + 1: one["heldout_accepted_length"] for one in records if one["heldout_accepted_length"]}
    extra = {
        "best_step": state["cursor"]["next_step"],
        "estimates": lengths,
        "heldout_seconds": [one["heldout_seconds"] for one in records if one["heldout_seconds"]],
        "training_seconds": sum(one["seconds"] for one in records[1:]),
        "answer_seconds": answer_seconds,
        "eval_seconds": eval_seconds,
        "measured": measured,
    }
    return rows_of(state["heldout"], measured), extra


def rows_of(estimate: Mapping[str, Any], measured: Mapping[str, Any]) -> list[Row]:
    """One row a source, and one for all."""
    lengths = {**estimate["by_source"], "all": estimate["accepted_length"]}
    rows = []
    for source, length in lengths.items():
        decoded = measured[source]["accepted_length"]
        rows.append(
            Row(
                case=source,
                metric="best checkpoint's held-out estimate; ratio: smaller by larger of it and what is decoded",
                unit="tokens a round",
                ours=length,
                baseline=decoded,
                baseline_name="slipstream eval",
                ratio=min(length, decoded) / max(length, decoded),
                floor=FLOOR,
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = [f"{'source':<16}{'estimate':>10}{'decoded':>10}{'ratio':>8}"]
    lines += [f"{row.case:<16}{row.ours:>10.4f}{row.baseline or 0:>10.4f}{row.ratio or 0:>8.4f}" for row in rows]
    return "\n".join(lines) + "\n"


def _run(place: Place, command: list[str], log: Path) -> float:
    """Seconds that a process of ours took to its end.

    Raises:
        TrainingFailedError, InterruptedTrainingError.
    """
    began = time.monotonic()
    with (
        log.open("wb") as output,
        child_process([sys.executable, "-m", *command], environment=place.environment, output=output) as process,
    ):
        while process.poll() is None:
            if place.stopped():
                raise InterruptedTrainingError(f"the time was up, see {log}")
            time.sleep(0.1)
    if process.returncode != 0:
        raise TrainingFailedError(f"{command[1]} ended with {process.returncode}, see {log}")
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
