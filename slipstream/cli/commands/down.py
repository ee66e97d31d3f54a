"""`slipstream down`: stop the local stack in order; trainers save first."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

_EPILOG = """
exit status: 0 nothing of the stack runs any more, or nothing ran; 19 something could not be ended. Runs are kept:
`slipstream up` goes on with them.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("down", help="stop the local stack: trainers save first", epilog=_EPILOG)
    parser.add_argument("--home", type=Path, metavar="DIR", help="default: $SLIPSTREAM_HOME, else ~/.slipstream")


def run(args: argparse.Namespace) -> int:
    """Stop whatever runs, also what a supervisor that was killed has left.

    Raises:
        SlipstreamError: STACK_FAILED, something could not be ended.
    """
    # pydantic costs a tenth of a second: not for `--help`.
    from slipstream.launcher.home import home_directory
    from slipstream.launcher.running import stop

    home = home_directory(args.home)
    ran = stop(home, _say)
    _say("stopped" if ran else f"nothing runs in {home}")
    return 0


def _say(sentence: str) -> None:
    """On stderr. Whoever reads it may have left: the stack is stopped in order all the same."""
    with suppress(OSError, ValueError):
        print(sentence, file=sys.stderr, flush=True)
