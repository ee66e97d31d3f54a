"""SIGTERM and SIGINT: the first asks the run to save and leave, the second leaves at once. An agent that has gone asks
as well, once."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from slipstream.telemetry.logs import log_event

_AGENT_GONE = 0  # in the place of a signal's number
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_END_SECONDS = 10.0

_log = logging.getLogger(__name__)


class StopRequest:
    """A context in which both signals are taken; main thread only. `event` is set by the first one."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._listeners: list[Callable[[], None]] = []
        self._previous: dict[int, object] = {}
        self._previous_wakeup = -1
        self._reader, self._writer = -1, -1
        self._is_open = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="stop-request", daemon=True)

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener`, in another thread, once a stop is requested."""
        self._listeners.append(listener)

    def agent_gone(self) -> None:
        """Ask as a first signal does; signals that follow count from one. Safe in any thread."""
        with self._is_open:
            if self._writer >= 0:
                os.write(self._writer, bytes([_AGENT_GONE]))

    def __enter__(self) -> "StopRequest":
        # Python runs a handler in the main thread, and not before that wakes up: one that goes to wait for its next
        # pack just as the signal arrives would sleep on it. The descriptor is written by the C handler, at once.
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, _leave_it_to_the_descriptor)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_wakeup)
        with self._is_open:
            os.close(self._writer)
            self._writer = -1
        # A thread that still wants to run while the interpreter ends takes the process down with SIGABRT.
        self._thread.join(_END_SECONDS)

    def _watch(self) -> None:
        asked_by = self._next(_AGENT_GONE, *_SIGNALS)
        if asked_by == _AGENT_GONE:
            self._ask(asked_by)
            # An agent that was started again may ask for the same.
            asked_by = self._next(*_SIGNALS)
            if asked_by is not None:
                _say(asked_by)
        elif asked_by is not None:
            self._ask(asked_by)
        if asked_by is not None and (again := self._next(*_SIGNALS)) is not None:
            os._exit(128 + again)
        os.close(self._reader)

    def _ask(self, asked_by: int) -> None:
        _say(asked_by)
        self.event.set()
        for listener in self._listeners:
            listener()

    def _next(self, *kinds: int) -> int | None:
        """The next of these; None once the context was left."""
        while byte := os.read(self._reader, 1):
            if byte[0] in kinds:
                return byte[0]
        return None


def _leave_it_to_the_descriptor(_number: int, _frame: FrameType | None) -> None:
    """A handler, so that the signal does not end the process."""


def _say(asked_by: int) -> None:
    log_event(
        _log,
        "info",
        "stop_requested",
        by=signal.Signals(asked_by).name if asked_by != _AGENT_GONE else "the end of the agent",
        then="the current step is finished and saved; a second signal leaves at once",
    )
