"""`python -m slipstream.launcher`: the supervisor of a stack as a process of its own, in the background."""

import argparse
import logging
import sys
from pathlib import Path

from slipstream.entrypoint import run_main
from slipstream.errors import SlipstreamError
from slipstream.launcher.home import take_over
from slipstream.launcher.supervisor import Supervisor
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import configure_logging, log_event

PROGRAM = "slipstream-supervisor"

_log = logging.getLogger(__name__)


def main() -> int:
    """Run until a signal, or until the program that asked for it has ended."""
    return run_main(PROGRAM, _supervise)


def _supervise() -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Keeps the stack of a home alive.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--lock-fd", type=int, help="the home's supervisor.lock, taken by who starts this process")
    parser.add_argument("--while-stdin-open", action="store_true", help="stop once stdin is closed")
    options = parser.parse_args()
    configure_logging(PROGRAM)
    # Kept in this variable: the lock is given back when the process ends, and no child inherits it.
    lock = open(options.lock_fd, "ab") if options.lock_fd is not None else take_over(options.home)  # noqa: SIM115, PTH123
    if lock is None:
        raise SlipstreamError(
            f"a supervisor runs for {options.home} already", reason=Reason.NAME_TAKEN, remedy="Leave it be."
        )
    with lock:
        supervisor = Supervisor(
            options.home,
            say=lambda sentence: log_event(_log, "info", "supervisor", says=sentence),
            alive_with=sys.stdin.fileno() if options.while_stdin_open else None,
        )
        return 0 if supervisor.run() else 1


if __name__ == "__main__":
    sys.exit(main())
