"""`slipstream run create`: a recipe of this machine becomes a run of a control API."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import recipes
from slipstream.cli.api_access import control_api, say_next
from slipstream.cli.display import print_json, print_line
from slipstream.cli.runs import figures
from slipstream.cli.runs.local_files import require_local_files
from slipstream.cli.runs.next_steps import say_next_steps
from slipstream.cli.runs.served_model import served_model
from slipstream.cli.runs.watch import watch_run
from slipstream.control_client import ControlClient, segment
from slipstream.drafter_name import RunName, drafter_name
from slipstream.mask_token import require_mask
from slipstream.plan.admission import known_sizes, require_fit
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.spec import RunSpec
from slipstream.run_spec.states import ACTIVE


def create(args: argparse.Namespace) -> int:
    """Check the recipe here, send it, and watch the run if that was asked for.

    Raises:
        SlipstreamError: SPEC_INVALID with every error of the recipe, or no mask token where the target is on this
            machine; DATA_INVALID, MODEL_INVALID and CHECKPOINT_INVALID, a file that is not on this machine where all
            runs on it; OUT_OF_MEMORY, as `slipstream plan`; what the API refuses, such as a target that serves another
            model.
    """
    name = [f"name={json.dumps(args.name)}"] if args.name is not None else []
    path = recipes.find_recipe(args.recipe)
    spec = load_recipe(path, [*args.set, *name]).spec
    if (served := served_model(args, spec)) is not None:
        # The dtype is the server's whatever a run says; held-out answers of another one are refused.
        dtype = (
            "" if served.dtype == spec.target.dtype else f", its target.dtype {served.dtype} (not {spec.target.dtype})"
        )
        print(f"the run's target.model is what this stack serves: {served.model}{dtype}", file=sys.stderr)
        overrides = [f"target.model={json.dumps(served.model)}", "target.revision=", f"target.dtype={served.dtype}"]
        spec = load_recipe(path, [*args.set, *name, *overrides]).spec
    require_mask(spec)
    body = {"spec": _as_sent(spec), "note": args.note} | ({"target": args.target} if args.target else {})
    with control_api(args) as client:
        require_local_files(spec, client, args.target)
        _require_fit(spec, client)
        run = client.post("/v1/runs", body)
        if args.output != "json" and (first := run["spec"]["drafter"]["init_from"]) is not None:
            print(f"the run begins with the drafter {first}", file=sys.stderr)
        if args.watch:
            return watch_run(client, args, run["name"], first=run)
        if args.output == "json":
            print_json(run)
            return 0
        print_line(f"{run['name']} {run['state']} on target {run['target']}")
        if (why := figures.unfit(run)) is not None:
            print(why, file=sys.stderr)
        # It may have been given to one in this moment.
        elif not any(one["status"] == "FREE" or one["run"] == run["name"] for one in client.listing("/v1/trainers")):
            print("no trainer is free: the run waits for one", file=sys.stderr)
            _say_what_may_go(spec, client)
            say_next(args, "trainer start")
    say_next_steps(args, run)
    return 0


def _say_what_may_go(spec: RunSpec, client: ControlClient) -> None:
    """A run that waits for a trainer may begin after its first drafter was replaced by newer checkpoints."""
    named = spec.drafter.init_from
    meant = None if named is None else drafter_name(named, None)
    if not isinstance(meant, RunName) or meant.choice == "best":
        return
    source = client.get(f"/v1/runs/{segment(meant.run)}")
    if source["state"] in ACTIVE:
        keep = source["spec"]["checkpoint"]["keep"]
        fate = f"keeps its newest {keep}: once that drafter is none of them this run cannot begin"
        print(f"{meant.run} still trains and {fate}", file=sys.stderr)


def _require_fit(spec: RunSpec, client: ControlClient) -> None:
    """As `slipstream plan` does it, for the trainers that are there; the API may lack the files that tell the sizes."""
    if (sizes := known_sizes(spec)) is not None:
        present = [one for one in client.listing("/v1/trainers") if one["status"] in ("FREE", "BUSY")]
        require_fit(sizes, spec.train, [(one["name"], one["devices"]) for one in present])


def _as_sent(spec: RunSpec) -> dict[str, Any]:
    """The definition, with the data that ships with Slipstream named so that it is found in another installation."""
    definition = spec.model_dump(mode="json")
    files = definition["data"]["files"]
    definition["data"]["files"] = [f"data/{Path(file).name}" if recipes.data_file(file) else file for file in files]
    return definition
