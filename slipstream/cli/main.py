"""`slipstream …`: one module per command, imported only when it is asked for, and never torch."""

import importlib
import sys
from collections.abc import Sequence

from slipstream import __version__
from slipstream.command_parser import CommandParser
from slipstream.entrypoint import run_main

PROGRAM = "slipstream"

COMMANDS = {
    "checkpoint": "checkpoints of a run",
    "data": "what becomes of conversations: tokens, masks, lengths, drops; index them ahead of a run",
    "demo": "train a drafter for a small real model on this machine, in minutes",
    "doctor": "what this machine has, what is missing, and what will run where",
    "down": "stop the local stack: trainers save first",
    "eval": "decode prompts with a trained drafter: accepted length, speed, losslessness",
    "plan": "what a run will need of memory, time, wire and disk, before anything starts",
    "recipe": "print a run definition, resolved, with where each value came from",
    "run": "runs of a control API: create, list, watch, pause, resume, stop, delete",
    "target": "target servers that a control API knows",
    "trainer": "trainers: start, list, attach to a run, detach",
    "up": "bring up control API, target server and trainers on this machine, and keep them up",
    "version": "print versions",
}
"""Every command with its line in `slipstream --help`; the module of the same name in `commands` does the work.

Such a module has `add_parser(subparsers)`, which registers the command under its name, and `run(args) -> int`; perhaps
`complete(arguments)`, which writes out what was left out.
"""


_ELSEWHERE = {
    **{word: f"run {word}" for word in ("create", "events", "get", "logs", "ls", "pause", "resume", "stop", "watch")},
    "attach": "trainer attach",
    "detach": "trainer detach",
    "drain": "target drain",
    "export": "checkpoint export",
    "index": "data index",
    "inspect": "data inspect",
    "list": "run ls",
    "regenerate": "data regenerate",
    "serve": "up",
    "show": "run get",
    "start": "up",
    "status": "run ls",
    "train": "run create",
    "worker": "trainer start",
}
"""What people type in place of a command and its action."""


def main() -> int:
    """The console script."""
    return run_main(PROGRAM, lambda: run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Parse, run the command and return its exit status.

    Raises:
        SlipstreamError: whatever the command refuses.
        SystemExit: usage errors (2) and --help (0).
    """
    parser = CommandParser(
        prog=PROGRAM, description="Train the drafters that make large language models decode several times faster."
    )
    parser.elsewhere = _ELSEWHERE
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name == chosen:
            module = importlib.import_module(f"slipstream.cli.commands.{name}")
            module.add_parser(subparsers)
            arguments = module.complete(arguments) if hasattr(module, "complete") else arguments
        else:
            subparsers.add_parser(name, help=summary)
    parsed = parser.parse_args(arguments or ["--help"])
    status: int = importlib.import_module(f"slipstream.cli.commands.{parsed.command}").run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
