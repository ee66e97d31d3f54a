"""What becomes of a run, as pure functions: verbs, reports of trainers, silence. No database, no clock."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from control_api.trainer_schemas import ObservedState
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.states import (
    ACTIVE,
    AT_REST,
    EVENT_TABLE,
    VERB_TABLE,
    WORKING,
    Condition,
    RunEvent,
    RunState,
    Verb,
    Verdict,
    allowed_verbs,
)

TRAINERS_PER_RUN = 1
"""A training process owns its run alone: it seeks a new incarnation, which voids that of any other."""


class TransitionIllegalError(SlipstreamError):
    """A verb, an attach or a delete that the run's state does not permit."""

    def __init__(self, message: str, state: RunState) -> None:
        self.state = state
        self.allowed = allowed_verbs(state)
        if self.allowed:
            remedy = f"Allowed now: {', '.join(self.allowed)}."
        elif state is RunState.STOPPING:
            remedy = "Wait until it is STOPPED."
        else:
            remedy = "It is finished; a new run whose drafter.init_from names one of its checkpoints trains on."
        super().__init__(message, reason=Reason.TRANSITION_ILLEGAL, remedy=remedy)


def name_taken(name: str, state: RunState) -> SlipstreamError:
    """The refusal of a second run of the name, with what the first one's state permits."""
    run = shlex.quote(name)
    ways = ["Give the new one another name (--name, or the override name=…)"]
    if Verb.RESUME in allowed_verbs(state) and state in AT_REST:
        ways.append(f"go on with that one: `slipstream run resume {run}`")
    stop = f"`slipstream run stop {run}`, then " if Verb.STOP in allowed_verbs(state) else ""
    then = "once it is STOPPED, " if state is RunState.STOPPING else ""
    ways.append(f"{then}{stop}`slipstream run delete {run}`, which leaves its files where they are")
    message = f"There is a run {name!r} already; it is {state}."
    return SlipstreamError(message, reason=Reason.NAME_TAKEN, remedy=f"{'; or '.join(ways)}.")


def after_verb(run: str, state: RunState, verb: Verb) -> RunState:
    """The state that the verb leads to; the same one when there is nothing to do.

    Raises:
        TransitionIllegalError: the verb is refused in this state.
    """
    outcome = VERB_TABLE[verb][state]
    if outcome is Verdict.ILLEGAL:
        raise TransitionIllegalError(f"Run {run!r} is {state}, where {verb} is not possible.", state)
    return outcome if isinstance(outcome, RunState) else state


def after_event(state: RunState, event: RunEvent) -> RunState:
    """The state that the event leads to; the same one when it changes nothing."""
    return EVENT_TABLE[event].get(state, state)


def event_of_report(state: RunState, observed: ObservedState, *, others: int = 0) -> RunEvent | None:
    """What a trainer's report means for a run in `state`.

    Args:
        state: of the run.
        observed: what the trainer says of its own work.
        others: trainers that hold the run beside this one.
    """
    if observed == "SUCCEEDED":
        return RunEvent.FINISHED
    if observed == "FAILED":
        return RunEvent.FATAL
    if observed == "RUNNING":
        return RunEvent.FIRST_STEP
    if observed == "PAUSED" and state is RunState.PAUSING:
        return RunEvent.CHECKPOINT_SAVED
    if observed == "STOPPED" and not others:
        return RunEvent.CHECKPOINT_SAVED if state is RunState.STOPPING else RunEvent.RELEASED
    return None


def ends_assignment(observed: ObservedState) -> bool:
    """Whether a trainer that reports this has nothing more to do with the run."""
    return observed in ("STOPPED", "SUCCEEDED", "FAILED")


@dataclass(frozen=True)
class Holder:
    """A trainer that has the run, as seen now."""

    trainer: str
    silent_seconds: float
    """Since its last heartbeat, or since the control plane started if that is later."""
    is_lost: bool
    target_unreachable: bool = False
    restarts_at: int | None = None
    """Its training process died and is started again: behind this many steps, 0 where there is no checkpoint."""


def event_of_silence(state: RunState, holders: Sequence[Holder], *, grace_seconds: float) -> RunEvent | None:
    """What it means for a run in `state` that nobody works on it any more; None while somebody does, or may yet."""
    if any(not one.is_lost for one in holders) or state in (RunState.PENDING, RunState.PAUSED) or state in AT_REST:
        return None
    if not holders:
        return RunEvent.RELEASED if state in WORKING else RunEvent.CHECKPOINT_SAVED
    if state in WORKING and min(one.silent_seconds for one in holders) < grace_seconds:
        return None
    return RunEvent.TRAINERS_LOST


def conditions(
    state: RunState,
    holders: Sequence[Holder],
    *,
    target: str | None,
    waits_for: str,
    misfit: str | None,
    ended_early: bool,
) -> dict[Condition, str]:
    """What is worth saying about a run beside its state.

    Args:
        state: of the run.
        holders: its trainers.
        target: why the target cannot be used now; None when it can.
        waits_for: why none of those that are there takes the run; empty where none is free.
        misfit: why none of those that are there can train it, whatever becomes free; None where one can.
        ended_early: its trainer was lost while it was pausing or stopping.
    """
    found: dict[Condition, str] = {}
    lost = [one.trainer for one in holders if one.is_lost]
    if state is RunState.PENDING and misfit is not None:
        found[Condition.NO_TRAINER_FITS] = misfit
    elif state is RunState.PENDING and target is None:
        found[Condition.NO_TRAINER_FREE] = waits_for or "No trainer is free."
    waiting = [one.trainer for one in holders if one.target_unreachable]
    if (state in ACTIVE or state is RunState.PENDING) and (target is not None or waiting):
        found[Condition.TARGET_UNREACHABLE] = target or f"{', '.join(waiting)} waits for the target."
    if lost:
        kind = Condition.TRAINER_LOST if len(lost) == len(holders) else Condition.DEGRADED
        found[kind] = f"Nothing is heard of {', '.join(lost)}. {waits_for}".rstrip()
    restarting = {one.trainer: one.restarts_at for one in holders if one.restarts_at is not None and not one.is_lost}
    if restarting and state in WORKING:
        step = max(restarting.values())
        where = f"from the checkpoint of step {step}" if step else "from the beginning: there is no checkpoint yet"
        found[Condition.TRAINER_RESTARTING] = f"{', '.join(restarting)} starts again {where}."
    if ended_early and state in (RunState.PAUSED, RunState.STOPPED):
        found[Condition.ENDED_AT_LAST_CHECKPOINT] = "Steps after the last checkpoint will be trained again."
    return found
