"""The line from a training process to the agent that started it: news one way, a hang-up the other.

One end of a socket pair, inherited as a descriptor. News are JSON lines. When the agent dies, the system closes its
end, and the training process saves and leaves, so that it does not train on for nobody.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


class AgentLine:
    """What a training process says to its agent; says nothing where it was started by hand."""

    def __init__(self, descriptor: int | None) -> None:
        """`descriptor`: a connected stream socket, given away to this object; None: there is no agent."""
        self._socket: socket.socket | None = None
        # Threads tell at the same time, and the kernel takes a long line in parts.
        self._telling = threading.Lock()
        if descriptor is None:
            return
        try:
            self._socket = socket.socket(fileno=descriptor)
        except OSError as error:
            raise SlipstreamError(
                f"--agent-fd {descriptor} is no socket: {error.strerror}.",
                reason=Reason.SPEC_INVALID,
                remedy="The flag is for `drafter-trainer worker`; leave it out.",
            ) from error
        # What this process starts must not keep the line open.
        self._socket.set_inheritable(False)

    @property
    def has_agent(self) -> bool:
        """Whether an agent started this process, not a person."""
        return self._socket is not None

    def waits_for_target(self, reason: Reason | None) -> None:
        """The run waits for its target, for this reason; None: it goes on."""
        self._tell(waits_for_target=reason)

    def reads_over(self, transport: str) -> None:
        """How packs come from the target to this process: `shm` or `grpc`."""
        self._tell(transport=transport)

    def data_read(self, account: Mapping[str, Any]) -> None:
        """What the target found in the run's data: see `DataReport.account`."""
        self._tell(data=account)

    def joined(self, next_step: int, total_steps: int) -> None:
        """The run has its place at the target."""
        self._tell(next_step=next_step, total_steps=total_steps)

    def ended(self, how: str, next_step: int | None = None) -> None:
        """How the process ends: `finished`, `stopped` or `exhausted`, everything learned is on disk."""
        self._tell(end=how, next_step=next_step)

    @contextmanager
    def failures_told(self) -> Iterator[None]:
        """Tell why the block was left by an exception, then raise it."""
        try:
            yield
        except SlipstreamError as error:
            self._tell(end="failed", reason=error.reason, message=error.message, remedy=error.remedy)
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {error}".strip()
            self._tell(end="failed", reason=Reason.INTERNAL, message=message, remedy="")
            raise

    def on_hang_up(self, callback: Callable[[], None]) -> None:
        """Call `callback`, in another thread, when the agent has gone."""
        if self._socket is not None:
            threading.Thread(
                target=self._wait_for_hang_up, args=(self._socket, callback), name="agent-line", daemon=True
            ).start()

    def _wait_for_hang_up(self, line: socket.socket, callback: Callable[[], None]) -> None:
        with suppress(OSError):
            # The agent never sends anything: what can be read is the end.
            line.recv(1)
        callback()

    def _tell(self, **news: Any) -> None:
        if self._socket is not None:
            with self._telling, suppress(OSError):  # the agent has gone
                self._socket.sendall(json.dumps(news).encode() + b"\n")


NO_AGENT = AgentLine(None)
"""Of a process that a person started."""
