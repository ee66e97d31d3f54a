"""SIGTERM and SIGINT: the first asks the run to save and leave, the second leaves at once. An agent that has gone asks
as well, once."""

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from slipstream.telemetry.logs import log_event

_AGENT_GONE = 0  # in the place of a signal's number

_log = logging.getLogger(__name__)


class StopRequest:
    """A context in which both signals are taken. `event` is set by the first one."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._listeners: list[Callable[[], None]] = []
        # A handler runs between any two instructions of the main thread, which may hold any lock just then; this queue
        # is the one primitive that is safe there. A thread does the rest.
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._previous: dict[int, object] = {}

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener`, in another thread, once a stop is requested."""
        self._listeners.append(listener)

    def agent_gone(self) -> None:
        """Ask as a first signal does; signals that follow count from one. Safe in any thread."""
        self._signals.put(_AGENT_GONE)

    def __enter__(self) -> "StopRequest":
        threading.Thread(target=self._watch, name="stop-request", daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._signals.put(number)

    def _watch(self) -> None:
        asked_by = self._signals.get()
        _say(asked_by)
        self.event.set()
        for listener in self._listeners:
            listener()
        if asked_by == _AGENT_GONE:
            # An agent that was started again may ask for the same.
            _say(self._next_signal())
        os._exit(128 + self._next_signal())

    def _next_signal(self) -> int:
        while (number := self._signals.get()) == _AGENT_GONE:
            pass
        return number


def _say(asked_by: int) -> None:
    log_event(
        _log,
        "info",
        "stop_requested",
        by=signal.Signals(asked_by).name if asked_by != _AGENT_GONE else "the end of the agent",
        then="the current step is finished and saved; a second signal leaves at once",
    )
