"""Ctrl-C at a command that only looks on: it leaves in order, says so, and touches nothing."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.cli.exit_status import DETACHED


class Outcome:
    """How a command ends."""

    status = 0


@contextmanager
def detachable(say: Callable[[], str]) -> Iterator[Outcome]:
    """Within, Ctrl-C ends the block: `say` gives the words, and the outcome's status says so too."""
    outcome = Outcome()
    try:
        yield outcome
    except KeyboardInterrupt:
        # An impatient second one would only break off the clean end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        outcome.status = DETACHED
        print(f"\n{say()}", file=sys.stderr)
