"""Brings every run closer to what is wanted of it: finds trainers, notices silence, keeps the conditions.

Level-triggered: each pass looks at what is stored and at the clock, never at what happened since the last one, so it
may be stopped at any point and started again.
"""

from collections.abc import Callable, Sequence

from sqlalchemy.orm import Session

from control_api import lifecycle
from control_api.background import BackgroundThread
from control_api.model_match import other_model
from control_api.needs import Needs
from control_api.placement import misfit, obstacle, rank, why_waiting
from control_api.settings import Settings
from control_api.store import answers, checkpoints, events, runs, trainers
from control_api.store.database import Database
from control_api.store.tables import Assignment, Run, Trainer
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.states import AT_REST, WORKING, Condition, RunEvent, RunState


class Reconciler(BackgroundThread):
    """Looks every `settings.reconcile_seconds`, and after every change of a run."""

    def __init__(self, database: Database, settings: Settings, clock: Callable[[], float]) -> None:
        super().__init__("reconciler", self.reconcile, seconds=settings.reconcile_seconds)
        self._database = database
        self._settings = settings
        self._clock = clock
        self.needs = Needs(settings.data_roots)
        """What each run asks of a trainer."""
        self._listens_since = self._looked_at = clock()
        database.add_listener(lambda _runs: self.wake())

    def is_lost(self, trainer: Trainer, now: float) -> bool:
        """Whether the trainer has been silent for too long."""
        return self.silent_seconds(trainer, now) > self._settings.trainer_timeout

    def silent_seconds(self, trainer: Trainer, now: float) -> float:
        """Since its last heartbeat that could have been heard: a control plane that was away hears nothing."""
        if self._was_away(now):
            return 0.0
        # What lies far in the future was noted before the clock was set back; a heartbeat may be newer than this `now`.
        heard_at = trainer.last_seen_at if trainer.last_seen_at <= now + self._settings.trainer_timeout else 0.0
        return max(0.0, now - max(heard_at, self._listens_since))

    def _was_away(self, now: float) -> bool:
        """Whether too long no pass over the runs has come to its end.

        This process stood still, or the machine slept, or the database could not be written; or the clock was set. In
        all of these nothing was heard, or nobody knows for how long.
        """
        # More than two passes apart in any case: else a short timeout would make every pause between them an absence.
        longest = max(self._settings.trainer_timeout / 2, 3 * self._settings.reconcile_seconds)
        return abs(now - self._looked_at) > longest

    def reconcile(self) -> None:
        """One pass over all runs.

        Raises:
            SlipstreamError: the database cannot be used now.
        """
        now = self._clock()
        if self._was_away(now):
            self._listens_since = now
        with self._database.read() as session:
            self.needs.find_out(runs.unsettled(session))
        with self._database.write() as session:
            answers.forget_old(session, now=now)
            for run in runs.unsettled(session):
                self._reconcile_run(session, run, now)
        self._looked_at = now

    def _reconcile_run(self, session: Session, run: Run, now: float) -> None:
        self._end_what_is_over(session, run, now)
        waits_for = self._find_trainer(session, run, now)
        state = RunState(run.state)
        held = trainers.open_assignments(session, run)
        holders = self._holders(session, held, now)
        event = lifecycle.event_of_silence(state, holders, grace_seconds=self._settings.grace_seconds)
        if event is not None:
            self._apply(session, run, event, held, now)
        self._refresh_conditions(session, run, waits_for, now)

    def _end_what_is_over(self, session: Session, run: Run, now: float) -> None:
        for assignment in trainers.open_assignments(session, run):
            if run.state in AT_REST:
                trainers.end_assignment(session, assignment, reason=run.state, now=now)
            elif assignment.detach and self.is_lost(assignment.trainer, now):
                # Nobody will report that it has left.
                trainers.end_assignment(session, assignment, reason="DETACHED", now=now)

    def _find_trainer(self, session: Session, run: Run, now: float) -> str:
        """Give the run a trainer if it needs one; returns why there is none."""
        held = trainers.open_assignments(session, run)
        needs_one = run.state == RunState.PENDING or run.state in WORKING
        if not needs_one or any(not self.is_lost(one.trainer, now) for one in held):
            return ""
        if run.target.status != "REACHABLE":
            return ""
        if (wrong := other_model(run.spec, run.target)) is not None:
            return wrong
        trainer, waits_for = self._choose(session, run, now)
        if trainer is None:
            return waits_for
        for assignment in held:
            trainers.end_assignment(session, assignment, reason="REPLACED", now=now)
        trainers.assign(session, run, trainer, now=now)
        if run.state == RunState.PENDING:
            runs.move(session, run, RunState.STARTING, runs.Cause(RunEvent.ASSIGNED, message=trainer.name), now=now)
        return ""

    def _choose(self, session: Session, run: Run, now: float) -> tuple[Trainer | None, str]:
        """The best of the free trainers that can take the run; or why there is none, where there is more to say."""
        need, at_work = self.needs.of(run), trainers.at_work(session)
        fit: list[Trainer] = []
        able: dict[str, str] = {}
        unfit: list[str] = []
        # What keeps a free one from it is said first.
        for trainer in sorted(self.present(session, now), key=lambda one: one.id in at_work):
            is_free = trainer.id not in at_work
            why = obstacle(run, need, trainer)
            if why is None and is_free and trainers.was_detached(session, run, trainer):
                why = f"{trainer.name} was detached from {run.name}; attach it, or start another trainer."
            if why is not None:
                unfit.append(why)
            elif trainer.leaving:
                continue  # it takes no other run
            elif is_free:
                fit.append(trainer)
            else:
                able[trainer.name] = at_work[trainer.id]
        best = min(fit, key=lambda one: (*rank(need, one), one.id), default=None)
        return best, "" if best is not None else why_waiting(able, unfit)

    def misfit(self, session: Session, run: Run, now: float) -> str | None:
        """Why none of the trainers that are heard of can train the run; None where one can, or there are none."""
        present = self.present(session, now)
        gone = [one for one in trainers.known(session) if one not in present]
        return misfit(run, self.needs.of(run), present, gone)

    def present(self, session: Session, now: float) -> list[Trainer]:
        """The trainers that are heard of, free or not."""
        return [one for one in trainers.present(session) if not self.is_lost(one, now)]

    def _apply(self, session: Session, run: Run, event: RunEvent, held: Sequence[Assignment], now: float) -> None:
        state = RunState(run.state)
        message, reason = "", None
        if event is RunEvent.TRAINERS_LOST:
            names = ", ".join(one.trainer.name for one in held)
            message = f"Nothing was heard of {names} for {self._settings.trainer_timeout:g} s or longer."
            if state in WORKING:
                reason = Reason.TRAINERS_LOST
                message = f"Nothing was heard of {names} for {self._settings.grace_seconds:g} s. " + (
                    "Start a trainer, then resume the run: it goes on from its last checkpoint."
                )
            run.ended_early = state not in WORKING and any(one.observed != "PAUSED" for one in held)
            for assignment in held:
                trainers.end_assignment(session, assignment, reason="LOST", now=now)
        cause = runs.Cause(event, reason, message)
        runs.move(session, run, lifecycle.after_event(state, event), cause, now=now)

    def _holders(self, session: Session, held: Sequence[Assignment], now: float) -> list[lifecycle.Holder]:
        return [
            lifecycle.Holder(
                trainer=one.trainer.name,
                silent_seconds=self.silent_seconds(one.trainer, now),
                is_lost=self.is_lost(one.trainer, now),
                target_unreachable=one.target_unreachable,
                restarts_at=(checkpoints.newest_step(session, one.run_id) or 0) if one.restarting else None,
            )
            for one in held
        ]

    def _refresh_conditions(self, session: Session, run: Run, waits_for: str, now: float) -> None:
        target = None if run.target.status == "REACHABLE" else f"{run.target.name}: {run.target.detail}"
        found = lifecycle.conditions(
            RunState(run.state),
            self._holders(session, trainers.open_assignments(session, run), now),
            target=target,
            waits_for=waits_for,
            misfit=self.misfit(session, run, now) if run.state == RunState.PENDING else None,
            ended_early=run.ended_early,
        )
        if run.state in WORKING and (run.stream_stats or {}).get("packs_held_back"):
            again = f"`slipstream target resume {run.target.name} {run.name}` gives them again."
            found[Condition.PACKS_HELD_BACK] = f"{run.target.name} holds its packs back. {again}"
        set_conditions(session, run, found, now=now)


def set_conditions(session: Session, run: Run, found: dict[Condition, str], *, now: float) -> None:
    """Store the conditions; one that came or went is an event."""
    known = {one["type"]: one for one in run.conditions}
    fresh = [
        {"type": type_, "message": message, "since": known[type_]["since"] if type_ in known else now}
        for type_, message in found.items()
    ]
    if fresh == run.conditions:
        return
    for type_ in found.keys() - known.keys():
        data = {"condition": type_, "holds": True}
        events.append(session, run.id, events.NewEvent("CONDITION_CHANGED", found[type_], data), now=now)
    for type_ in known.keys() - found.keys():
        data = {"condition": type_, "holds": False}
        events.append(session, run.id, events.NewEvent("CONDITION_CHANGED", "", data), now=now)
    run.conditions = fresh
