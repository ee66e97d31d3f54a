"""The agent's loop: say how it stands, read what is desired, bring it about, wait for the next thing to happen."""

import logging
import random
import time
from collections.abc import Mapping
from typing import Any

from drafter_trainer.agent.assignment import Assignment
from drafter_trainer.agent.child import Child
from drafter_trainer.agent.identity import Identity
from drafter_trainer.agent.signals import Signals
from drafter_trainer.agent.work import Work, Workplace
from slipstream.control_client import ControlApiRefusalError, ControlApiUnreachableError, ControlClient, segment
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event

_HEARTBEAT_SECONDS = 2.0
_LOOK_SECONDS = 1.0
"""Between two looks at what nothing tells of: the lock of an orphan, a time that has come."""
_FAREWELL_SECONDS = 10.0
"""How long an agent that leaves tries to say so, once nothing runs any more."""
_SAY_AGAIN_SECONDS = 30.0

# Refusals that trying again does not mend, and that mean: this agent has no business here.
_FINAL = frozenset({Reason.NAME_TAKEN, Reason.ACCESS_DENIED, Reason.PROTOCOL_MISMATCH})

_log = logging.getLogger(__name__)


class Agent:
    """One trainer. Single-threaded; `run` returns when it was told to leave."""

    def __init__(self, client: ControlClient, identity: Identity, place: Workplace) -> None:
        self._client = client
        self._identity = identity
        self._place = place
        self._work: Work | None = None
        self._interval = _HEARTBEAT_SECONDS
        self._next_beat = 0.0
        self._is_registered = False
        self._is_dismissed = False
        self._refusal: SlipstreamError | None = None
        self._said_away_at: float | None = None

    def run(self) -> None:
        """Until SIGTERM or SIGINT, which stop the training process in order.

        Raises:
            SlipstreamError: the control API refuses this agent for good; the training process has been stopped.
            SystemExit: a second signal came; the training process was killed.
        """
        try:
            with Signals() as signals:
                while not signals.leave and self._refusal is None:
                    self._turn(signals, leaving=False)
                self._leave(signals)
        except SystemExit:
            if self._child is not None:
                self._child.kill()
            raise
        if self._refusal is not None:
            raise self._refusal

    @property
    def _child(self) -> Child | None:
        return self._work.child if self._work is not None else None

    def _leave(self, signals: Signals) -> None:
        log_event(_log, "info", "leaving", name=self._identity.name)
        self._next_beat = 0.0
        # Once through in any case, to say it.
        self._turn(signals, leaving=True)
        while self._child is not None:
            self._turn(signals, leaving=True)
        until = time.monotonic() + _FAREWELL_SECONDS
        while self._is_registered and not self._is_dismissed and self._refusal is None and time.monotonic() < until:
            self._turn(signals, leaving=True)
        log_event(_log, "info", "left", name=self._identity.name, told_the_api=self._is_dismissed)

    def _turn(self, signals: Signals, *, leaving: bool) -> None:
        now = time.monotonic()
        if self._work is not None and self._work.advance(now, leaving=leaving):
            self._next_beat = now
        if now >= self._next_beat and self._refusal is None:
            self._beat(now, leaving=leaving)
            return
        seconds = _LOOK_SECONDS if self._refusal is not None else min(_LOOK_SECONDS, self._next_beat - now)
        child = self._child
        signals.wait(seconds, *([child] if child is not None and not child.has_hung_up else []))

    def _beat(self, now: float, *, leaving: bool) -> None:
        work = self._work
        report = work.reporter.build(work.standing) if work is not None else None
        body = {"instance_id": self._identity.instance_id, "leaving": leaving, "report": report}
        self._next_beat = now + self._interval
        try:
            if not self._is_registered:
                self._register()
            answer = self._client.post_once(f"/v1/trainers/{segment(self._identity.name)}:heartbeat", body)
            if self._said_away_at is not None:
                log_event(_log, "info", "control_api_is_back", api=self._client.address)
            self._said_away_at = None
            self._obey(answer)
            # The first answer may want the next heartbeat sooner than was thought.
            self._next_beat = min(self._next_beat, now + self._interval)
        except ControlApiUnreachableError as error:
            self._not_heard(error, now)
        except ControlApiRefusalError as error:
            self._refused(error, now)
        except SlipstreamError as error:  # the answer cannot be understood
            self._refusal = error
        else:
            self._is_dismissed = leaving and self._work is None and answer.get("assignment") is None

    def _register(self) -> None:
        device = self._place.device
        self._client.post_once("/v1/trainers", self._identity.registration(device))
        self._is_registered = True
        log_event(
            _log, "info", "registered", name=self._identity.name, api=self._client.address,
            device=f"{device.kind}:{device.index}" if device.is_cuda else device.kind, runs=str(self._place.runs),
        )  # fmt: skip

    def _obey(self, answer: Mapping[str, Any]) -> None:
        fields = answer.get("assignment")
        named = Assignment.from_answer(fields) if fields is not None else None
        self._interval = float(answer.get("heartbeat_seconds", self._interval))
        done: tuple[int, str | None] | None = None
        if self._work is not None:
            work, done = self._work, self._work.assignment.key
            heard_before = work.reporter.heard_state
            work.reporter.answered(answer.get("acknowledged"))
            if work.reporter.heard_state != heard_before:
                log_event(_log, "info", "reported", run=work.assignment.run, state=work.reporter.heard_state)
            if named is not None and named.key == done:
                work.assignment = named
            else:
                work.is_retired = True
            if work.reporter.has_more:
                self._next_beat = 0.0
            if work.is_over:
                log_event(_log, "info", "assignment_over", run=work.assignment.run, assignment=done[0])
                self._work = None
        if self._work is None and named is not None and named.key != done:
            log_event(_log, "info", "assignment", run=named.run, attempt=named.attempt, desired=named.desired_state)
            self._work = Work(named, self._place)

    def _refused(self, error: ControlApiRefusalError, now: float) -> None:
        if error.reason is Reason.TRAINER_UNKNOWN and self._is_registered:
            log_event(_log, "warning", "trainer_unknown", then="registers again")
            self._is_registered = False
            self._next_beat = 0.0
        elif error.reason in _FINAL or (not self._is_registered and error.status < 500):
            self._refusal = error
        else:
            self._not_heard(error, now)

    def _not_heard(self, error: SlipstreamError, now: float) -> None:
        """Training goes on; what was not heard is said again. Many agents do not come back at the same moment."""
        self._next_beat = now + self._interval * random.uniform(0.5, 1.0)
        if self._said_away_at is None or now - self._said_away_at >= _SAY_AGAIN_SECONDS:
            log_event(_log, "warning", "control_api_does_not_answer", detail=error.message)
            self._said_away_at = now
