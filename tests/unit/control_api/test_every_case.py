"""Every state × verb × trainer, generated from the table: what the verb does, and where the run then comes to rest."""

import pytest
from fastapi.testclient import TestClient

from control_api.dependencies import Services
from control_api.settings import Settings
from control_api.store import runs
from slipstream.run_spec.states import ACTIVE, VERB_TABLE, RunState, Verb, Verdict
from tests.fakes.control_plane import Desk, assert_problem, report

OBEYED = {
    RunState.PENDING: RunState.RUNNING,
    RunState.STARTING: RunState.RUNNING,
    RunState.PAUSING: RunState.PAUSED,
    RunState.STOPPING: RunState.STOPPED,
}
"""With a trainer that does what it is told."""
LOST = OBEYED | {
    RunState.PENDING: RunState.PENDING,
    RunState.STARTING: RunState.FAILED,
    RunState.RUNNING: RunState.FAILED,
}
"""With a trainer that is never heard of again."""
ALONE = LOST | {RunState.STARTING: RunState.PENDING, RunState.RUNNING: RunState.PENDING}
"""Without any trainer."""


@pytest.fixture
def settings() -> Settings:
    """A grace of half a minute: every pass on the way to its end costs time."""
    return Settings(grace_seconds=30.0)


def put(desk: Desk, services: Services, state: RunState, trainer: str) -> None:
    """The run `demo` in a state, with a trainer where that state may have one."""
    if trainer == "none":
        desk.target()
        desk.run()
    else:
        work = desk.running()
        desk.beat("t1", report(work, "PAUSED" if state is RunState.PAUSED else "RUNNING"))
    if trainer == "lost":
        desk.clock.forward(16)
    with services.database.write() as session:
        row = runs.find(session, "demo")
        assert row is not None
        if state is RunState.PENDING:
            for one in row.assignments:
                one.ended_at = desk.clock()
            session.flush()
            session.expire(row, ["assignments"])
        runs.move(session, row, state, runs.Cause("test"), now=desk.clock())
    if state not in (RunState.PENDING, *ACTIVE):
        desk.reconcile()  # whoever held it is free


def obey(desk: Desk) -> None:
    """Heartbeats and passes until nothing changes any more."""
    for _ in range(3):
        desk.reconcile()
        assignment = desk.beat("t1")["assignment"]
        if assignment is not None:
            desk.beat("t1", report(assignment["id"], assignment["desired_state"]))


@pytest.mark.parametrize("trainer", ["alive", "lost", "none"])
@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("state", RunState)
def test_where_it_ends(
    client: TestClient, desk: Desk, services: Services, state: RunState, verb: Verb, trainer: str
) -> None:
    put(desk, services, state, trainer)
    held = bool(desk.get("runs/demo")["trainers"])
    assert held == (trainer != "none" and state in ACTIVE)

    response = client.post(f"/v1/runs/demo:{verb}")
    outcome = VERB_TABLE[verb][state]
    after = outcome if isinstance(outcome, RunState) else state
    if outcome is Verdict.ILLEGAL:
        assert assert_problem(response, 409, "TRANSITION_ILLEGAL")["current_state"] == state
    else:
        assert response.json()["state"] == after

    if trainer == "alive":
        obey(desk)
    else:
        desk.reconcile()
        desk.clock.forward(31)
        desk.reconcile()
    table = OBEYED if trainer == "alive" else LOST if held else ALONE
    run = desk.get("runs/demo")
    assert run["state"] == table.get(after, after)
    assert (run["reason"] == "TRAINERS_LOST") == (run["state"] == "FAILED" != state)
    assert client.post(f"/v1/runs/demo:{verb}").status_code in (200, 409), "and it can be spoken to"
