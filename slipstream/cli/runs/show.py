"""`slipstream run ls` and `slipstream run get`."""

import argparse
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from slipstream.cli.api_access import control_api, say_next
from slipstream.cli.display import (
    ABSENT,
    Column,
    age,
    is_terminal,
    local_time,
    make_console,
    measure,
    percent,
    print_fields,
    print_json,
    print_table,
)
from slipstream.cli.runs import figures
from slipstream.cli.runs.next_steps import say_next_steps
from slipstream.control_client import segment
from slipstream.run_spec.states import AT_REST

_HELD_OUT, _BEST = "HELD OUT", "BEST"
"""Accepted length on held-out answers, now and of the best checkpoint; shown where any run measures it."""
_COLUMNS = (
    Column("NAME", may_wrap=True),
    Column("STATE"),
    Column("PROGRESS"),
    Column("STEP", is_number=True, rank=2),
    Column("LOSS", is_number=True, rank=1),
    Column("ACCEPTED", is_number=True, rank=5),
    Column(_HELD_OUT, is_number=True, rank=4),
    Column(_BEST, is_number=True, rank=6),
    Column("TOKENS/S", is_number=True, rank=7),
    Column("ETA", is_number=True, rank=3),
    Column("TRAINER", rank=8),
    Column("TARGET", rank=10),
    Column("TRANSPORT", rank=11),
    Column("AGE", is_number=True, rank=9),
)
_BAR_CELLS = 10
_WIDTH_FOR_BARS = 70


def list_runs(args: argparse.Namespace) -> int:
    """Print the runs, or those in one state."""
    with control_api(args) as client:
        runs = list(client.listing("/v1/runs", state=args.state))
    if args.output == "json":
        print_json({"runs": runs})
        return 0
    if runs:
        measures = any(run.get("heldout") for run in runs)
        shown = [index for index, one in enumerate(_COLUMNS) if measures or one.title not in (_HELD_OUT, _BEST)]
        rows = [_row(run) for run in runs]
        print_table([_COLUMNS[index] for index in shown], [[row[index] for index in shown] for row in rows])
        say_next_steps(args, _most_interesting(runs))
    else:
        print(f"no run is {args.state}" if args.state else "no runs")
        say_next(args, "run create RECIPE")
    return 0


def get_run(args: argparse.Namespace) -> int:
    """Print one run; its definition too, if that was asked for."""
    with control_api(args) as client:
        run = client.get(f"/v1/runs/{segment(args.run)}")
    if args.output == "json":
        print_json(run)
        return 0
    if args.spec:
        print(_as_recipe(run["spec"]), end="")
        return 0
    print_fields(_fields(run))
    print()
    columns = (Column("SINCE"), Column("STATE"), Column("CAUSE"), Column("WHY", may_wrap=True))
    changes = [
        (local_time(one["time"]), one["state"], one["cause"], f"{one['reason'] or ''} {one['message']}".strip())
        for one in run["history"]
    ]
    print_table(columns, changes)
    say_next_steps(args, run)
    return 0


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    progress, record, heldout = run["progress"], run["latest_metrics"] or {}, run.get("heldout") or {}
    return (
        run["name"],
        run["state"],
        _bar(progress["fraction"]),
        figures.steps(progress),
        measure(record.get("loss")),
        figures.accepted_length(record),
        figures.heldout_length(heldout.get("latest")),
        figures.heldout_length(heldout.get("best")),
        figures.pace(run),
        figures.time_left(run),
        ", ".join(run["trainers"]) or ABSENT,
        run["target"],
        run.get("transport") or ABSENT,
        age(run["created_at"]),
    )


def _bar(fraction: float | None) -> str:
    """Percent; behind a bar where a person looks at it."""
    console = make_console()
    if fraction is None or not is_terminal() or console.encoding != "utf-8" or console.width < _WIDTH_FOR_BARS:
        return percent(fraction)
    full = int(fraction * _BAR_CELLS)
    return f"{'█' * full}{'░' * (_BAR_CELLS - full)} {percent(fraction):>6}"


def _most_interesting(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest one that is not at rest, else the newest."""
    moving = [run for run in runs if run["state"] not in AT_REST]
    return (moving or runs)[-1]


def _fields(run: Mapping[str, Any]) -> dict[str, str]:
    throughput = run["throughput"] or {}
    checkpoint = run["latest_checkpoint_step"]
    waits = throughput.get("data_wait_ratio")
    heldout = run.get("heldout") or {}
    best = figures.heldout_words(heldout.get("best"))
    target_pace = measure(throughput.get("target_tokens_per_second"), 0)
    possible = [*run["allowed_verbs"], *(["delete"] if run["state"] in AT_REST else [])]
    return {
        "name": run["name"],
        "state": run["state"],
        "reason": f"{run['reason'] or ''} {run['message']}".strip(),
        "conditions": "\n".join(f"{one['type']}: {one['message']}" for one in run["conditions"]),
        "progress": figures.progress_words(run),
        "accepted length, held out": figures.heldout_words(heldout.get("latest")),
        "best checkpoint": best,
        "data": figures.data_words(run.get("data")),
        "waits for packs": f"{percent(waits)} of the time" if waits is not None else "",
        "target computes": f"{target_pace} tokens/s" if target_pace != ABSENT else "",
        "bottleneck": str(throughput.get("bottleneck") or ""),
        "trainer": ", ".join(run["trainers"]),
        "target": run["target"],
        "transport": run.get("transport") or "",
        "checkpoint": f"step {checkpoint}" if checkpoint is not None else "none yet",
        "files": f"in {run['directory']}, below its trainer's directory of runs",
        "note": run["note"],
        "created": f"{local_time(run['created_at'])} ({age(run['created_at'])} ago)",
        "possible now": ", ".join(possible) or "nothing",
    }


def _as_recipe(spec: Mapping[str, Any]) -> str:
    """The definition as TOML; it is a recipe of its own.

    Raises:
        SlipstreamError: SPEC_INVALID, the run is defined by a newer Slipstream.
    """
    from slipstream.run_spec.load import LoadedSpec, describe, parse_spec

    return describe(LoadedSpec(parse_spec(spec), defaultdict(str)))
