"""`slipstream eval RUN[@STEP] …`: starts `drafter-trainer eval`, which needs torch; this process only finds the run."""

import argparse

from slipstream.cli.api_access import add_access_flags
from slipstream.cli.checkpoint_path import checkpoint_path
from slipstream.stand_in import run_for

_TYPED = "slipstream eval"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command; every argument is passed on."""
    parser = subparsers.add_parser(
        "eval",
        help="decode prompts with a trained drafter: accepted length, speed, losslessness",
        add_help=False,
        # Not even --help is this parser's own: all but the flags that lead to the control API go on as they are.
        prefix_chars="\0",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the evaluation in its own process and return its exit status.

    Raises:
        SlipstreamError: what comes first is no path, and no run with such a checkpoint on this machine.
    """
    flags = argparse.ArgumentParser(prog=_TYPED, usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    add_access_flags(flags)
    access, arguments = flags.parse_known_args(args.arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments[0] = checkpoint_path(access, arguments[0], "eval {}")
    status = run_for(_TYPED, "drafter_trainer", ["eval", *arguments])
    if {"-h", "--help"}.intersection(arguments):
        print(f"\n{flags.format_help()}", end="")
    return status
