"""The tables of states, against the one in the design written out again."""

import pytest

from slipstream.run_spec.states import (
    ACTIVE,
    AT_REST,
    DESIRED,
    EVENT_TABLE,
    VERB_TABLE,
    DesiredState,
    RunEvent,
    RunState,
    Verb,
    Verdict,
    allowed_verbs,
)

DESIGN = """
| verb \\ state | PENDING | STARTING | RUNNING | PAUSING | PAUSED | STOPPING | STOPPED | FAILED | SUCCEEDED |
| pause | 409 | →PAUSING | →PAUSING | no-op | no-op | 409 | 409 | 409 | 409 |
| resume | 409 | no-op | no-op | →RUNNING | →STARTING | 409 | →STARTING | →STARTING | 409 |
| stop | →STOPPED | →STOPPING | →STOPPING | →STOPPING | →STOPPING | no-op | no-op | 409 | 409 |
"""


def cells() -> list[tuple[str, str, str]]:
    """(verb, state, outcome) of every cell."""
    head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in DESIGN.strip().splitlines()]
    return [(row[0], state, cell) for row in rows for state, cell in zip(head[1:], row[1:], strict=True)]


def test_the_design_names_every_state_and_verb() -> None:
    assert {(verb, state) for verb, state, _ in cells()} == {(verb, state) for verb in Verb for state in RunState}


@pytest.mark.parametrize(("verb", "state", "outcome"), cells())
def test_verb_in_state(verb: str, state: str, outcome: str) -> None:
    found = VERB_TABLE[Verb(verb)][RunState(state)]
    expected = RunState(outcome[1:]) if outcome.startswith("→") else Verdict(outcome)
    assert found is expected
    assert (Verb(verb) in allowed_verbs(RunState(state))) == outcome.startswith("→")


def test_events_lead_where_the_design_says() -> None:
    state = RunState
    assert EVENT_TABLE[RunEvent.FIRST_STEP] == {state.STARTING: state.RUNNING}
    assert EVENT_TABLE[RunEvent.CHECKPOINT_SAVED] == {state.PAUSING: state.PAUSED, state.STOPPING: state.STOPPED}
    assert set(EVENT_TABLE[RunEvent.FINISHED].values()) == {state.SUCCEEDED}
    assert set(EVENT_TABLE[RunEvent.FATAL].values()) == {state.FAILED}
    assert state.PAUSED not in EVENT_TABLE[RunEvent.TRAINERS_LOST]
    assert EVENT_TABLE[RunEvent.TRAINERS_LOST][state.RUNNING] is state.FAILED


def test_nothing_moves_a_run_that_is_at_rest_but_a_verb() -> None:
    assert not [event for event in RunEvent if AT_REST & EVENT_TABLE[event].keys()]
    assert {one for one in RunState if not allowed_verbs(one)} == {RunState.STOPPING, RunState.SUCCEEDED}


def test_every_state_says_what_is_wanted() -> None:
    assert set(DESIRED) == set(RunState)
    assert {DESIRED[one] for one in AT_REST} == {DesiredState.STOPPED}
    assert AT_REST | ACTIVE | {RunState.PENDING} == set(RunState)
