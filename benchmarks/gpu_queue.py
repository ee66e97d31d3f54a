"""Work spread over the GPUs of a machine: every GPU has a thread that takes the next piece when it is done with one."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
POLL_SECONDS = 0.2


class Budget:
    """The time that a benchmark has, and whether it was told to end before."""

    def __init__(self, leave_by: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`leave_by`: seconds from now; None: as long as it takes."""
        self._clock = clock
        self._deadline = None if leave_by is None else clock() + leave_by
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Nothing new is begun, and what waits gives up."""
        self._stopped.set()

    def stopped(self) -> bool:
        """Whether `stop` was called, or the time is over: what still waits then gives up."""
        return self._stopped.is_set() or not self._left(0.0)

    def allows(self, seconds: float) -> bool:
        """Whether something that takes so long may still begin."""
        return not self._stopped.is_set() and self._left(seconds)

    def _left(self, seconds: float) -> bool:
        return self._deadline is None or self._deadline - self._clock() >= seconds


def spread(
    gpus: Sequence[int], items: Sequence[Item], work: Callable[[int, Iterator[Item]], None], budget: Budget
) -> None:
    """Call `work(gpu, items)` in one thread a GPU, until the items are used up; each is handed to one of them.

    Raises:
        Whatever a thread raises first, after the others have given up.
    """
    queue = deque(items)

    def remaining() -> Iterator[Item]:
        while not budget.stopped():
            try:
                yield queue.popleft()
            except IndexError:
                return

    with ThreadPoolExecutor(len(gpus)) as pool:
        running = {pool.submit(work, gpu, remaining()) for gpu in gpus}
        try:
            while running:
                # With a timeout, so that a signal's handler runs.
                done, running = wait(running, timeout=POLL_SECONDS, return_when="FIRST_COMPLETED")
                for one in done:
                    one.result()
        except BaseException:
            budget.stop()
            raise
