"""What a trainer says of its target, in the log and to its agent: that it waits and why, and what it was answered."""

import logging
import threading
import time
from collections.abc import Callable

from drafter_trainer.agent_line import NO_AGENT, AgentLine
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from slipstream.wire.data_report import DataReport

_SAY_AGAIN_SECONDS = 30.0

_log = logging.getLogger(__name__)


class WaitNotice:
    """Says why the trainer waits: when it begins, when the reason changes, and again every half minute."""

    def __init__(self, address: str, agent: AgentLine = NO_AGENT, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._agent = agent
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[int, Reason] = {}
        """By thread: a target that cannot take one's commit may still give the other packs."""
        self._told: Reason | None = None
        """What the agent was told last: always the reason of some thread that waits, or None when none does."""
        self._told_at = 0.0

    def __call__(self, reason: Reason, _seconds: float) -> None:
        """For TargetClient's `on_wait`."""
        with self._lock:
            is_new = reason not in self._waiting.values()
            self._waiting[threading.get_ident()] = reason
            if is_new or self._told_is_over() or self._clock() - self._told_at >= _SAY_AGAIN_SECONDS:
                self._tell(reason)

    def greeted(self, transport: str) -> None:
        """The target has answered, and packs will be read over this transport."""
        self._agent.reads_over(transport)

    def opened(self, report: DataReport) -> None:
        """The target has read the run's data, and found this."""
        self._agent.data_read(report.account())

    def over(self) -> None:
        """For TargetClient's `on_answer`. Others may wait on; once none does, the next wait is news again."""
        with self._lock:
            if self._waiting.pop(threading.get_ident(), None) is None:
                return
            if not self._waiting:
                self._told = None
                log_event(_log, "info", "target_is_back", address=self._address)
                self._agent.waits_for_target(None)
            elif self._told_is_over():
                self._tell(next(iter(self._waiting.values())))

    def _told_is_over(self) -> bool:
        return self._told not in self._waiting.values()

    def _tell(self, reason: Reason) -> None:
        # Under the lock, so that the agent hears in the order in which things happened.
        self._told, self._told_at = reason, self._clock()
        then = "it is asked again until it answers; Ctrl-C leaves"
        log_event(_log, "warning", "waiting_for_target", address=self._address, reason=reason.value, then=then)
        self._agent.waits_for_target(reason)
