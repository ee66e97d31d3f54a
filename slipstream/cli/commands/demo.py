"""`slipstream demo`: train a drafter for a small real model on this machine, and decode with it. Minutes, no network.

Nothing in it is special: a local stack as `slipstream up` starts it, a run as `slipstream run create` creates it, and
the evaluation of `slipstream eval`.
"""

import argparse
import itertools
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recipes
from slipstream.child_processes import child_process, exit_status, one_gpu, sigterm_as_exit
from slipstream.cli.demo_report import DemoResult, print_summary, summarise, write_summary
from slipstream.cli.runs.watch import screen_for
from slipstream.control_client import ControlApiUnreachableError, ControlClient, segment
from slipstream.errors import SlipstreamError
from slipstream.launcher.home import Home, is_up, read_supervisor
from slipstream.launcher.planning import TARGET_NAME, Wanted, plan_stack
from slipstream.launcher.running import RunningStack, running_stack
from slipstream.launcher.stack import Stack
from slipstream.listen import read_token
from slipstream.machine_probe import probe_accelerator, usable_cores
from slipstream.packaged_model import MODEL_PACKAGE, RECIPE, given_model, packaged_model
from slipstream.run_spec.device import overrides_for
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from slipstream.run_spec.states import AT_REST

MARKER = ".slipstream-demo"
"""Only a directory that holds this file is ever emptied."""
STACK = "stack"
_EVERY_SECONDS = 10.0
_LOOK_SECONDS = 0.5


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("demo", help="train a drafter for SmolLM2-135M here, in minutes, and decode with it")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("demo"),
        help="where everything goes; beside it, as DIRECTORY-2, where a drafter lies already (default: demo)",
    )
    parser.add_argument("--model", help=f"target; default: the .gguf in the package {MODEL_PACKAGE}")
    parser.add_argument("--recipe", type=Path, help=f"default: the shipped {RECIPE}.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe value")


@dataclass(frozen=True)
class Plan:
    """What the demo runs, and where."""

    spec: RunSpec
    stack: Stack
    directory: Path
    device: str
    device_name: str

    @property
    def home(self) -> Path:
        """Of the stack: `slipstream up --home …` shows the demo's run again."""
        return self.directory / STACK


def run(args: argparse.Namespace) -> int:
    """Run the demo from start to table.

    Raises:
        SlipstreamError: the model is missing, the stack does not come up, the run or the evaluation failed; or
            NOT_LOSSLESS, decoding with the drafter changed an output; the summary is written all the same.
    """
    with sigterm_as_exit():
        plan = make_plan(args)
        if plan.directory != (earlier := args.directory.resolve()):
            _say(f"the drafter in {earlier} stays; this demo goes beside it")
        prepare_directory(plan.directory)
        _say(f"target {Path(plan.spec.target.model).name} and drafter on {plan.device_name}, all in {plan.directory}")
        started = time.monotonic()
        with running_stack(plan.stack, plan.home, say=_say) as running:
            _say(f"dashboard: {running.dashboard_url}")
            run_directory = train(plan, running)
            report = evaluate(plan, run_directory)
            seconds = time.monotonic() - started
    result = DemoResult(
        model=Path(plan.spec.target.model).name,
        device=plan.device_name,
        objective=plan.spec.loss.objective,
        metrics=run_directory / "metrics.jsonl",
        evaluation=report,
        dashboard=running.dashboard_url,
        seconds=seconds,
    )
    summary = summarise(result)
    path = plan.directory / "summary.json"
    write_summary(path, summary)
    print_summary(summary, report, path)
    _say(f"next: slipstream up --home {plan.home}   brings its dashboard back")
    if not summary["lossless"]:
        raise SlipstreamError(
            "decoding with the drafter changed an output by more than rounding explains (see the evaluation above)",
            reason=Reason.NOT_LOSSLESS,
            remedy=f"This is a defect of decoding: please report it with {plan.directory / 'eval.json'}.",
        )
    return 0


def make_plan(args: argparse.Namespace) -> Plan:
    """Decide model, devices and threads before anything starts or is removed.

    Raises:
        SlipstreamError: MODEL_INVALID, no model; SPEC_INVALID, an override; PATH_NOT_ALLOWED, the directory holds
            something that is not a demo.
    """
    directory = choose_directory(args.directory.resolve())
    accelerator = probe_accelerator()
    model = given_model(args.model) if args.model else packaged_model()
    recipe = args.recipe or recipes.recipe_path(RECIPE)
    overrides = [f"target.model={model}"]
    overrides += overrides_for(load_recipe(recipe, overrides).spec.train, "cpu" if accelerator is None else "cuda")
    overrides += args.set
    wanted = Wanted(
        recipe=str(recipe.absolute()),
        overrides=tuple(overrides),
        listen="127.0.0.1:0",
        target_listen="127.0.0.1:0",
        trainers=1,
    )
    return Plan(
        spec=load_recipe(recipe, overrides).spec,
        stack=plan_stack(wanted, None, working_directory=directory),
        directory=directory,
        device="cpu" if accelerator is None else "cuda",
        device_name=accelerator or f"CPU, {usable_cores()} cores",
    )


def choose_directory(wanted: Path) -> Path:
    """The directory that is wanted; where an earlier demo has left a drafter, the next beside it: `demo-2`, `demo-3`.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, it holds something that is not a demo, or no directory can be so;
            STACK_DIFFERS, a demo runs there.
    """
    beside = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    try:
        _require_replaceable(wanted)
        return wanted if not _has_drafter(wanted) else next(one for one in beside if _is_free(one))
    except OSError as error:  # a name that is too long, or a directory on the way that may not be searched
        raise _refused(f"{wanted} cannot be used: {error.strerror}") from error


def _has_drafter(directory: Path) -> bool:
    return any(Home(directory / STACK).runs.glob("*/checkpoints/step-*"))


def _is_free(directory: Path) -> bool:
    try:
        _require_replaceable(directory)
    except SlipstreamError:
        return False
    return not _has_drafter(directory)


def prepare_directory(directory: Path) -> None:
    """Make the directory, or empty it if a demo that left no drafter lies there.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, it is something else, or cannot be written.
    """
    _require_replaceable(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # First, and never removed: after an interrupted start the directory is still known as a demo's.
        (directory / MARKER).write_text(
            "slipstream demo empties this directory when it starts, unless a drafter was trained in it.\n",
            encoding="utf-8",
        )
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
    if is_up(directory / STACK):
        raise SlipstreamError(
            f"the stack of an earlier demo is up in {directory / STACK}",
            reason=Reason.STACK_DIFFERS,
            remedy=f"Stop it with `slipstream down --home {directory / STACK}`, or choose another --directory.",
        )


def _refused(message: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.PATH_NOT_ALLOWED, remedy="Choose another place with --directory.")


def train(plan: Plan, running: RunningStack) -> Path:
    """Create the run by REST and follow it to its end; returns its directory.

    Raises:
        SlipstreamError: the run failed, or a process of the stack was given up.
    """
    body = {"target": TARGET_NAME, "spec": plan.spec.model_dump(mode="json"), "note": "slipstream demo"}
    with ControlClient(running.api_address, read_token(running.token_file)) as client:
        ended = _follow(client, client.post("/v1/runs", body), plan.home)
    if ended["state"] != "SUCCEEDED":
        raise SlipstreamError(
            f"run {ended['name']} {ended['state']}: {ended['message'] or 'it was told to by another client'}",
            reason=Reason(ended["reason"] or Reason.INTERNAL),
            remedy=f"Its log is in {Home(plan.home).runs / ended['directory'] / 'logs'}.",
        )
    return Home(plan.home).runs / str(ended["directory"])


def _follow(client: ControlClient, run: dict[str, Any], home: Path) -> dict[str, Any]:
    """Show the run until it rests."""
    with screen_for("text", _EVERY_SECONDS) as screen:
        while run["state"] not in AT_REST:
            screen.show(run)
            time.sleep(_LOOK_SECONDS)
            stack = read_supervisor(home)
            if stack is not None and stack.state == "DEGRADED":
                problems = [f"{one.name}: {one.problem}" for one in stack.processes if one.state == "GAVE_UP"]
                raise SlipstreamError(
                    "\n".join(problems), reason=Reason.STACK_FAILED, remedy="Mend what it names, then start again."
                )
            try:
                run = client.get(f"/v1/runs/{segment(run['name'])}")
            except ControlApiUnreachableError:
                # It is started again, or given up, which the next look shows.
                continue
        screen.end(run)
    return run


def evaluate(plan: Plan, run_directory: Path) -> dict[str, Any]:
    """Decode the held-out prompts before and after training; returns the report, lossless or not.

    Raises:
        SlipstreamError: the evaluation failed.
    """
    output = plan.directory / "eval.json"
    threads = usable_cores()
    # Decoding one prompt on a CPU keeps one core busy; on a GPU, one process does.
    jobs = min(threads, 4) if plan.device == "cpu" else 1
    command = [
        *(sys.executable, "-m", "drafter_trainer", "eval", str(run_directory), "--compare-untrained"),
        *("--device", plan.device, "--threads", str(threads), "--jobs", str(jobs), "--output", str(output)),
    ]
    environment = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if plan.device == "cuda":
        environment |= one_gpu()
    with child_process(command, environment=environment, output=None) as evaluation:
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


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
