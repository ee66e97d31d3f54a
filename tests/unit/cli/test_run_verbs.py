"""`slipstream run pause|resume|stop|delete` against a served control API: text, JSON, refusals, waiting."""

import itertools
import json
import re
import threading

import pytest

from control_api.store import runs
from slipstream.run_spec.states import AT_REST, VERB_TABLE, RunState, Verb, Verdict
from tests.fakes.control_plane import Desk, checkpoint, report
from tests.unit.cli.conftest import Command


@pytest.mark.parametrize("verb", ["pause", "stop"])
def test_verbs_answer_with_the_new_state(desk: Desk, slipstream: Command, verb: str) -> None:
    desk.running()
    answer = slipstream("run", verb, "demo")
    assert (answer.status, answer.out) == (0, {"pause": "demo PAUSING\n", "stop": "demo STOPPING\n"}[verb])
    assert answer.err == "next: slipstream run watch demo\n"
    answer = slipstream("run", verb, "demo", "-o", "json")
    assert (json.loads(answer.out)["state"], answer.err) == (desk.state(), "")


def test_every_verb_in_every_state(desk: Desk, slipstream: Command) -> None:
    desk.target()
    desk.run()
    # It would mend what has no trainer.
    desk.services.reconciler.stop()
    for verb, state in itertools.product(Verb, RunState):
        with desk.services.database.write() as session:
            row = runs.find(session, "demo")
            assert row is not None
            runs.move(session, row, state, runs.Cause("test"), now=1.0)
        answer = slipstream("run", verb, "demo")
        outcome = VERB_TABLE[verb][state]
        if outcome is Verdict.ILLEGAL:
            assert answer.status == 14, (verb, state)
            assert f"Run 'demo' is {state}, where {verb} is not possible." in answer.err
        else:
            after = state if outcome is Verdict.NO_OP else outcome
            assert (answer.status, answer.out.split()[:2]) == (0, ["demo", after]), (verb, state)


POSSIBLE = {
    "PENDING": "stop",
    "STARTING": "pause, stop",
    "RUNNING": "pause, stop",
    "PAUSING": "resume, stop",
    "PAUSED": "resume, stop",
    "STOPPING": "nothing",
    "STOPPED": "resume, delete",
    "FAILED": "resume, delete",
    "SUCCEEDED": "delete",
}


@pytest.mark.parametrize("state", RunState)
def test_what_is_possible_in_every_state(desk: Desk, slipstream: Command, state: RunState) -> None:
    desk.target()
    desk.run()
    desk.services.reconciler.stop()
    with desk.services.database.write() as session:
        row = runs.find(session, "demo")
        assert row is not None
        runs.move(session, row, state, runs.Cause("test"), now=1.0)
    answer = slipstream("run", "get", "demo")
    (listed,) = re.findall(r"^possible now +(.*)$", answer.out, re.MULTILINE)
    assert listed == POSSIBLE[state]
    moves = {verb for verb in Verb if isinstance(VERB_TABLE[verb][state], RunState)}
    assert set(listed.split(", ")) - {"delete", "nothing"} == moves
    assert ("delete" in listed) == (state in AT_REST)
    proposed = set(re.findall(r"next: slipstream run (pause|resume|stop|delete) ", answer.err))
    assert proposed <= set(listed.split(", ")), "the next command is possible"
    assert re.search(r"^files +in demo, below its trainer's directory of runs$", answer.out, re.MULTILINE)


def test_an_illegal_verb_names_what_is_possible(desk: Desk, slipstream: Command) -> None:
    desk.target()
    desk.run()
    answer = slipstream("run", "pause", "demo")
    assert answer.status == 14
    assert "Run 'demo' is PENDING, where pause is not possible.\n" in answer.err
    assert "remedy: Possible now: `slipstream run stop demo`.\n" in answer.err


def test_wait_until_paused(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    agent = threading.Thread(target=follow_desired_state, args=(desk, assignment), daemon=True)
    agent.start()
    answer = slipstream("run", "pause", "demo", "--wait")
    agent.join(30)
    assert (answer.status, answer.out) == (0, "demo PAUSED\n")
    assert answer.err == "next: slipstream run resume demo\n"


def follow_desired_state(desk: Desk, assignment: int) -> None:
    """An agent that does as it is told, once."""
    while (wanted := desk.beat()["assignment"]["desired_state"]) == "RUNNING":
        threading.Event().wait(0.05)
    desk.beat(report=report(assignment, wanted))


def test_waiting_in_vain(desk: Desk, slipstream: Command) -> None:
    desk.running()
    answer = slipstream("run", "pause", "demo", "--wait", "--timeout", "0")
    assert (answer.status, answer.out) == (17, "demo PAUSING\n")
    assert "not PAUSED after 0 s; what was asked for stays asked for" in answer.err


def test_waiting_for_a_run_that_ends_otherwise(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    desk.verb("pause")
    desk.beat(report=report(assignment, "SUCCEEDED"))
    assert slipstream("run", "pause", "demo", "--wait").status == 14
    assert slipstream("run", "stop", "demo", "--wait").status == 14
    answer = slipstream("run", "get", "demo")
    assert answer.err == "next: slipstream checkpoint ls demo\n"


def test_waiting_for_a_run_that_fails(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()

    def fail() -> None:
        while desk.state() != "STOPPING":
            threading.Event().wait(0.05)
        ended = {"child": 1, "message": "It broke.", "will_restart": False}
        desk.beat(report=report(assignment, "FAILED", exit=ended))

    agent = threading.Thread(target=fail, daemon=True)
    agent.start()
    answer = slipstream("run", "stop", "demo", "--wait")
    agent.join(30)
    assert answer.status == 20
    assert "It broke." in answer.out


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "soon"])
def test_timeouts_that_are_none(slipstream: Command, value: str) -> None:
    assert slipstream("run", "pause", "demo", "--wait", f"--timeout={value}").status == 2


# ---- delete


def test_delete_refuses_what_is_not_at_rest(desk: Desk, slipstream: Command) -> None:
    desk.running()
    answer = slipstream("run", "delete", "demo")
    assert answer.status == 14
    assert "Run 'demo' is RUNNING; it can be deleted in STOPPED, FAILED and SUCCEEDED." in answer.err
    assert "`slipstream run stop demo`" in answer.err
    assert desk.state() == "RUNNING"


def test_delete_says_where_files_stay(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    desk.verb("stop")
    desk.beat(report=report(assignment, "STOPPED", checkpoints=[checkpoint(20), checkpoint(40)]))
    answer = slipstream("run", "delete", "demo")
    assert answer.status == 0
    assert answer.out.splitlines() == [
        "demo is forgotten",
        "its files stay in demo below the trainer's directory of runs; its newest checkpoint is /runs/demo/step-40",
    ]
    assert slipstream("run", "get", "demo").status == 13


def test_delete_of_a_run_that_never_had_a_trainer(desk: Desk, slipstream: Command) -> None:
    desk.target()
    desk.run()
    desk.verb("stop")
    assert slipstream("run", "delete", "demo").out == "demo is forgotten\n"


def test_delete_of_a_run_without_a_checkpoint(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    desk.verb("stop")
    desk.beat(report=report(assignment, "STOPPED"))
    assert slipstream("run", "delete", "demo").out.splitlines() == [
        "demo is forgotten",
        "its files stay in demo below the trainer's directory of runs",
    ]


def test_delete_as_json(desk: Desk, slipstream: Command) -> None:
    desk.target()
    desk.run()
    desk.verb("stop")
    answer = slipstream("run", "delete", "demo", "-o", "json")
    assert json.loads(answer.out) == {"deleted": "demo", "directory": "demo", "checkpoints": []}
    assert answer.err == ""
