"""Why a training process ended, and whether another one may do better. Pure."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.run_spec.reasons import Reason

RESTARTS = 3
"""So many times a training process is started again without a newer checkpoint."""
_FIRST_SECONDS, _LONGEST_SECONDS = 1.0, 60.0

# What may be over when another process tries; everything else would end that one as well.
_PASSING = frozenset(
    {
        # Of a compiler whose state went wrong: another process has a new one.
        Reason.DENSE_ATTENTION,
        Reason.PACK_OUTSIDE_BUCKETS,
        Reason.INTERNAL,
        Reason.LEASE_LOST,
        Reason.LEASE_QUOTA_EXCEEDED,
        Reason.LEDGER_UNWRITABLE,
        Reason.NOT_READY,
        Reason.PAYLOAD_CORRUPT,
        Reason.SUBSCRIPTION_UNKNOWN,
        Reason.TARGET_DRAINING,
        Reason.TARGET_LOADING,
        Reason.TARGET_UNREACHABLE,
        Reason.TRANSPORT_UNAVAILABLE,
    }
)


@dataclass(frozen=True)
class Failure:
    """How a training process ended, other than in order."""

    reason: Reason
    message: str
    remedy: str = ""
    exit_code: int | None = None
    """Negative: the signal that killed it. None: it could not be started."""

    @property
    def may_pass(self) -> bool:
        """Whether it is worth starting another process."""
        return self.reason in _PASSING


def explain(exit_code: int, told: Mapping[str, Any], *, log: str) -> Failure:
    """From the exit status, and what the process told before (see `AgentLine`), to a reason in words.

    Args:
        exit_code: negative for a signal.
        told: its last news, merged.
        log: where its output is.
    """
    look = f"Its output is in {log}."
    if told.get("end") == "failed":
        return Failure(
            _reason(told.get("reason")), str(told.get("message")), str(told.get("remedy") or look), exit_code
        )
    if told.get("end") == "exhausted":
        return Failure(
            Reason.STREAM_CHANGED,
            f"The stream ended after step {told.get('next_step')} of {told.get('total_steps')}.",
            "Data that was there when the run began is missing: look at the target server's log.",
            exit_code,
        )
    if exit_code < 0:
        what = f"The training process was killed by {_signal_name(-exit_code)}."
        if exit_code == -signal.SIGKILL:
            return Failure(
                Reason.INTERNAL, what, f"Where nobody did that, this machine ran out of memory. {look}", exit_code
            )
    elif exit_code == 0:
        what = "The training process was told to leave, but not by its agent."
    else:
        what = f"The training process left with status {exit_code} and gave no reason."
    return Failure(Reason.INTERNAL, what, look, exit_code)


class Restarts:
    """Counts failures since the last checkpoint, and says how long to wait before the next start."""

    def __init__(self, newest_checkpoint: tuple[int, int] | None) -> None:
        """`newest_checkpoint`: (incarnation, step) of it before the first process."""
        self._checkpoint = newest_checkpoint
        self._failures = 0

    def seconds_before_next(self, newest_checkpoint: tuple[int, int] | None) -> float | None:
        """Count a failure; None when there have been enough."""
        if newest_checkpoint is not None and (self._checkpoint is None or newest_checkpoint > self._checkpoint):
            self._checkpoint = newest_checkpoint
            self._failures = 0
        self._failures += 1
        if self._failures > RESTARTS:
            return None
        return float(min(_FIRST_SECONDS * 2 ** (self._failures - 1), _LONGEST_SECONDS))


def _reason(text: object) -> Reason:
    try:
        return Reason(str(text))
    except ValueError:
        return Reason.INTERNAL


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
