"""`slipstream eval`: starts `drafter-trainer eval`, which needs torch; this process does not."""

import argparse
import sys

from slipstream.child_processes import child_process, exit_status, sigterm_as_exit


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command; every argument is passed on."""
    parser = subparsers.add_parser(
        "eval",
        help="decode prompts with a trained drafter: accepted length, speed, losslessness",
        add_help=False,
        # No argument is this parser's own, not even --help: all go to the evaluation as they are.
        prefix_chars="\0",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see drafter-trainer eval --help")


def run(args: argparse.Namespace) -> int:
    """Run the evaluation in its own process and return its exit status."""
    command = [sys.executable, "-m", "drafter_trainer", "eval", *args.arguments]
    with sigterm_as_exit(), child_process(command) as evaluation:
        return exit_status(evaluation)
