"""`drafter-trainer run`, annealed to a number of seconds instead of steps, and held at a gate until it may begin.

    python -m benchmarks.timed_trainer --seconds 210 --ready R --go G run RECIPE --target HOST:PORT --run-dir DIR

The same trainer, process and loop; only the learning rate's progress is that of the clock, and the run ends with the
step in which the time is over. The clock starts with the first step: compiling, and waiting for the first pack of an
idle server, are not counted. Without --seconds the schedule stays that of the recipe's steps.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.wire.channel import WaitInterruptedError

RESOLUTION = 1_000_000
"""Virtual steps of a schedule by the clock."""
GATE_SECONDS = 0.02


class ClockSchedule:
    """Stands for `learning_rate`: the same curve, over time.

    Args:
        standing: of the loop; its last step is set once the time is over.
        seconds: from the first call to the end.
        by_step: the schedule as a function of step and total steps.
        clock: in seconds.
    """

    def __init__(
        self, standing: Any, seconds: float, by_step: Callable[..., float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._standing, self._seconds, self._by_step, self._clock = standing, seconds, by_step, clock
        self._began: float | None = None

    def __call__(self, spec: Any, step: int, _total_steps: int) -> float:
        """The rate of a step that begins now."""
        now = self._clock()
        self._began = now if self._began is None else self._began
        share = (now - self._began) / self._seconds
        if share >= 1.0:
            self._standing.total_steps = step + 1
        return self._by_step(spec, min(int(share * RESOLUTION), RESOLUTION - 1), RESOLUTION)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="of training, from the first step on; default: by the recipe")
    parser.add_argument("--ready", type=Path, help="file that is written once everything is compiled and tried")
    parser.add_argument("--go", type=Path, help="file that is waited for before the run joins its stream")
    parser.add_argument("trainer", nargs=argparse.REMAINDER, metavar="run RECIPE …", help="as drafter-trainer takes it")
    args = parser.parse_args()

    from drafter_trainer import loop, start
    from drafter_trainer.cli import main as trainer_main

    # The module's names are exchanged, which the type checker must not see as assignments to functions.
    starting: Any = start
    if args.ready or args.go:
        starting.join = _gated(starting.join, args.ready, args.go)
    if args.seconds:
        starting.prepared_loop = _timed(starting.prepared_loop, loop, args.seconds)
    return trainer_main(args.trainer)


def _gated(join: Callable[..., Any], ready: Path | None, go: Path | None) -> Callable[..., Any]:
    """Before the run subscribes, so that nothing is leased or computed for one that waits; until it is told to end."""

    def gated(link: Any, *arguments: Any) -> Any:
        if ready is not None:
            ready.touch()
        while go is not None and not go.exists():
            if link._client.stop.wait(GATE_SECONDS):
                raise WaitInterruptedError("the gate")
        return join(link, *arguments)

    return gated


def _timed(prepared_loop: Callable[..., Any], loop_module: Any, seconds: float) -> Callable[..., Any]:
    @contextmanager
    def timed(*arguments: Any) -> Iterator[Any]:
        with prepared_loop(*arguments) as loop:
            loop_module.learning_rate = ClockSchedule(loop.standing, seconds, loop_module.learning_rate)
            yield loop

    return timed


if __name__ == "__main__":
    sys.exit(main())
