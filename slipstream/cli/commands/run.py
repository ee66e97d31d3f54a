"""`slipstream run …`: runs of a control API. The work is done by the modules of `slipstream.cli.runs`."""

import argparse
import importlib

from slipstream.cli.api_access import add_api_flags
from slipstream.flag_values import within
from slipstream.run_spec.states import RunState

_COUNT = within(int, 0, 1e9, "number of lines")
_SECONDS = within(float, 0, 1e9, "number of seconds")

HANDLERS = {
    "create": "create:create",
    "ls": "show:list_runs",
    "get": "show:get_run",
    "watch": "watch:watch",
    "logs": "lines:logs",
    "events": "lines:events",
    "pause": "verbs:apply_verb",
    "resume": "verbs:apply_verb",
    "stop": "verbs:apply_verb",
    "delete": "verbs:delete",
}
"""Action → module and function that do it."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("run", help="runs: create, list, watch, pause, resume, stop, delete")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_create(actions)
    ls = actions.add_parser("ls", help="list the runs")
    ls.add_argument(
        "--state",
        type=str.upper,
        choices=[str(state) for state in RunState],
        metavar="STATE",
        help="only runs in this state",
    )
    get = _add_action(actions, "get", "one run: state, progress, conditions, history")
    get.add_argument("--spec", action="store_true", help="print its definition instead, as a recipe")
    _add_every(_add_action(actions, "watch", "follow a run until it rests; Ctrl-C leaves it alone"))
    for name, summary, end in (
        ("logs", "what its training processes wrote", "the run rests"),
        ("events", "what happened to it", "Ctrl-C"),
    ):
        lines = _add_action(actions, name, summary)
        lines.add_argument("-f", "--follow", action="store_true", help=f"go on with what comes, until {end}")
        lines.add_argument("--tail", type=_COUNT, metavar="N", help="only the last N; default: all there are")
    for name, summary in (
        ("pause", "save and hold; the trainer stays"),
        ("resume", "go on, from the last checkpoint where nothing runs"),
        ("stop", "save and give the trainer back; it can be resumed"),
    ):
        verb = _add_action(actions, name, summary)
        verb.add_argument("--wait", action="store_true", help="until it is so")
        verb.add_argument(
            "--timeout", type=_SECONDS, default=300.0, metavar="SECONDS", help="of --wait; default: %(default)g"
        )
    _add_action(actions, "delete", "forget a run that is at rest; its files stay")
    for action in actions.choices.values():
        add_api_flags(action)


def run(args: argparse.Namespace) -> int:
    """Do what was asked.

    Raises:
        SlipstreamError: whatever the recipe or the control API refuses.
    """
    module, function = HANDLERS[args.action].split(":")
    status: int = getattr(importlib.import_module(f"slipstream.cli.runs.{module}"), function)(args)
    return status


def _add_create(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    create = actions.add_parser("create", help="create a run from a recipe")
    create.add_argument("recipe", metavar="RECIPE", help="a .toml file, or the name of a recipe that ships")
    create.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override; a later one wins")
    create.add_argument("--name", metavar="NAME", help="of the run; default: the recipe's")
    create.add_argument("--target", metavar="NAME", help="not needed where the API knows one target only")
    create.add_argument("--note", default="", metavar="TEXT", help="shown with the run")
    create.add_argument("--watch", action="store_true", help="then follow it, as `slipstream run watch` does")
    _add_every(create)


def _add_action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, summary: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=summary)
    parser.add_argument("run", metavar="RUN", help="its name")
    return parser


def _add_every(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--every",
        type=_SECONDS,
        default=10.0,
        metavar="SECONDS",
        help="between lines of progress where the output is no terminal; default: %(default)g",
    )
