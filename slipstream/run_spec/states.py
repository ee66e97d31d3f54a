"""States of a run: what a verb does in each, what the system's own events do, and what a run is expected to become.

All of it is data. The control plane applies it, the command line and the dashboard show it, tests enumerate it.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class RunState(StrEnum):
    """Where a run stands. The value travels on the wire; never rename one."""

    PENDING = "PENDING"
    """Waits for a trainer."""
    STARTING = "STARTING"
    """A trainer loads, warms up or resumes; no step yet."""
    RUNNING = "RUNNING"
    PAUSING = "PAUSING"
    """Asked to pause; the checkpoint is not reported yet."""
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    """Asked to stop; the checkpoint is not reported yet."""
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    SUCCEEDED = "SUCCEEDED"


class Verb(StrEnum):
    """What a person may ask of a run."""

    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"


class DesiredState(StrEnum):
    """What a trainer is told to bring about. A level, not an event: reading it twice does no harm."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    STOPPED = "STOPPED"


class Verdict(StrEnum):
    """What a verb does when it moves nothing."""

    NO_OP = "no-op"
    """Accepted: the run is there already, or on its way."""
    ILLEGAL = "409"
    """Refused."""


class RunEvent(StrEnum):
    """What happens to a run without anybody asking for it."""

    ASSIGNED = "ASSIGNED"
    """A trainer was found."""
    FIRST_STEP = "FIRST_STEP"
    """The trainer has trained its first step since it started."""
    CHECKPOINT_SAVED = "CHECKPOINT_SAVED"
    """The trainer is at rest, with everything it has learned on disk."""
    FINISHED = "FINISHED"
    """The last step is trained and saved."""
    RELEASED = "RELEASED"
    """The last trainer left in order: it was detached, or was told to shut down."""
    TRAINERS_LOST = "TRAINERS_LOST"
    """All trainers are silent, and in STARTING and RUNNING the grace time is over."""
    FATAL = "FATAL"
    """Something that trying again does not mend; comes with a reason."""


class Condition(StrEnum):
    """What is worth saying about a run beside its state."""

    NO_TRAINER_FREE = "NO_TRAINER_FREE"
    """PENDING, and every trainer that could take it has another run."""
    NO_TRAINER_FITS = "NO_TRAINER_FITS"
    """PENDING, and none of the trainers has a device that the run can train on and that can hold it: waiting does not
    help."""
    TARGET_UNREACHABLE = "TARGET_UNREACHABLE"
    """The target does not answer, loads its model, drains or cannot write its ledger; the run's trainer waits."""
    PACKS_HELD_BACK = "PACKS_HELD_BACK"
    """An operator lets the target give the run no packs, its trainer waits."""
    TRAINER_LOST = "TRAINER_LOST"
    """No trainer of the run is heard of."""
    DEGRADED = "DEGRADED"
    """Some trainers of the run are not heard of, others work."""
    TRAINER_RESTARTING = "TRAINER_RESTARTING"
    """The training process died and is started again from the last checkpoint."""
    ENDED_AT_LAST_CHECKPOINT = "ENDED_AT_LAST_CHECKPOINT"
    """The trainer was lost while the run was pausing or stopping: steps after that checkpoint will be trained again."""


_S, _NO_OP, _ILLEGAL = RunState, Verdict.NO_OP, Verdict.ILLEGAL

VERB_TABLE: Mapping[Verb, Mapping[RunState, RunState | Verdict]] = MappingProxyType(
    {
        Verb.PAUSE: MappingProxyType(
            {
                _S.PENDING: _ILLEGAL,
                _S.STARTING: _S.PAUSING,
                _S.RUNNING: _S.PAUSING,
                _S.PAUSING: _NO_OP,
                _S.PAUSED: _NO_OP,
                _S.STOPPING: _ILLEGAL,
                _S.STOPPED: _ILLEGAL,
                _S.FAILED: _ILLEGAL,
                _S.SUCCEEDED: _ILLEGAL,
            }
        ),
        Verb.RESUME: MappingProxyType(
            {
                _S.PENDING: _ILLEGAL,
                _S.STARTING: _NO_OP,
                _S.RUNNING: _NO_OP,
                _S.PAUSING: _S.RUNNING,
                _S.PAUSED: _S.STARTING,
                _S.STOPPING: _ILLEGAL,
                _S.STOPPED: _S.STARTING,
                _S.FAILED: _S.STARTING,
                _S.SUCCEEDED: _ILLEGAL,
            }
        ),
        Verb.STOP: MappingProxyType(
            {
                _S.PENDING: _S.STOPPED,
                _S.STARTING: _S.STOPPING,
                _S.RUNNING: _S.STOPPING,
                _S.PAUSING: _S.STOPPING,
                _S.PAUSED: _S.STOPPING,
                _S.STOPPING: _NO_OP,
                _S.STOPPED: _NO_OP,
                _S.FAILED: _ILLEGAL,
                _S.SUCCEEDED: _ILLEGAL,
            }
        ),
    }
)
"""Every verb in every state: the state it leads to, or a verdict."""

EVENT_TABLE: Mapping[RunEvent, Mapping[RunState, RunState]] = MappingProxyType(
    {
        RunEvent.ASSIGNED: MappingProxyType({_S.PENDING: _S.STARTING}),
        RunEvent.FIRST_STEP: MappingProxyType({_S.STARTING: _S.RUNNING}),
        RunEvent.CHECKPOINT_SAVED: MappingProxyType({_S.PAUSING: _S.PAUSED, _S.STOPPING: _S.STOPPED}),
        RunEvent.FINISHED: MappingProxyType(
            dict.fromkeys((_S.STARTING, _S.RUNNING, _S.PAUSING, _S.PAUSED, _S.STOPPING), _S.SUCCEEDED)
        ),
        RunEvent.RELEASED: MappingProxyType(
            {
                _S.STARTING: _S.PENDING,
                _S.RUNNING: _S.PENDING,
                _S.PAUSING: _S.PAUSED,
                _S.STOPPING: _S.STOPPED,
            }
        ),
        RunEvent.TRAINERS_LOST: MappingProxyType(
            {
                _S.STARTING: _S.FAILED,
                _S.RUNNING: _S.FAILED,
                _S.PAUSING: _S.PAUSED,
                _S.STOPPING: _S.STOPPED,
            }
        ),
        RunEvent.FATAL: MappingProxyType(
            dict.fromkeys((_S.STARTING, _S.RUNNING, _S.PAUSING, _S.PAUSED, _S.STOPPING), _S.FAILED)
        ),
    }
)
"""Where the system's events lead; in a state that is not listed they change nothing."""

DESIRED: Mapping[RunState, DesiredState] = MappingProxyType(
    {
        _S.PENDING: DesiredState.RUNNING,
        _S.STARTING: DesiredState.RUNNING,
        _S.RUNNING: DesiredState.RUNNING,
        _S.PAUSING: DesiredState.PAUSED,
        _S.PAUSED: DesiredState.PAUSED,
        _S.STOPPING: DesiredState.STOPPED,
        _S.STOPPED: DesiredState.STOPPED,
        _S.FAILED: DesiredState.STOPPED,
        _S.SUCCEEDED: DesiredState.STOPPED,
    }
)
"""What a trainer of a run in this state is told."""

AT_REST = frozenset({_S.STOPPED, _S.FAILED, _S.SUCCEEDED})
"""No trainer works on the run, and it may be deleted. STOPPED and FAILED can be resumed."""

ACTIVE = frozenset({_S.STARTING, _S.RUNNING, _S.PAUSING, _S.PAUSED, _S.STOPPING})
"""A trainer may hold the run, and can be detached from it."""

WORKING = frozenset({_S.STARTING, _S.RUNNING})
"""A trainer is needed; losing all of them ends the run after the grace time."""

ATTACHABLE = frozenset({_S.PENDING, _S.STARTING, _S.RUNNING, _S.PAUSED})
"""A trainer may be attached by hand."""


def allowed_verbs(state: RunState) -> tuple[Verb, ...]:
    """The verbs that move a run in `state`; one that it has followed already is accepted too, and changes nothing."""
    return tuple(verb for verb in Verb if isinstance(VERB_TABLE[verb][state], RunState))
