"""A thread that does the same piece of work again and again, on its own or when it is woken."""

import logging
import threading
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from slipstream.errors import SlipstreamError
from slipstream.telemetry.logs import log_event

_log = logging.getLogger(__name__)


class BackgroundThread:
    """Calls `work` every `seconds`, and at once after `wake`.

    The work looks at everything each time, so one that fails is logged and simply done again.
    """

    def __init__(self, name: str, work: Callable[[], None], *, seconds: float) -> None:
        self._work = work
        self._seconds = seconds
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        """False before `start`, after `stop`, and when a defect has ended the thread."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin, with a first piece of work."""
        self._wake.set()
        self._thread.start()

    def wake(self) -> None:
        """Something may have changed: look now."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread; idempotent."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        while True:
            self._wake.wait(self._seconds)
            self._wake.clear()
            if self._stopping.is_set():
                return
            try:
                self._work()
            except (SlipstreamError, SQLAlchemyError) as error:
                log_event(_log, "error", "background_work_failed", thread=self._thread.name, error=str(error))
