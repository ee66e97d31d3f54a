"""What a heartbeat leaves: metrics without a gap, events once, checkpoints as they are."""

import pytest
from fastapi.testclient import TestClient

from slipstream.wire.data_report import Finding, ReportBuilder
from tests.fakes.control_plane import Desk, checkpoint, record, report

GAVE_UP = {"child": 4, "reason": "OUT_OF_MEMORY", "message": "full.", "will_restart": False}


def test_metrics_are_stored_once_and_without_a_gap(desk: Desk) -> None:
    work = desk.running()

    def send(first: int, *steps: int) -> int:
        batch = {"first_index": first, "records": [record(step) for step in steps]}
        return int(desk.beat("t1", report(work, "RUNNING", metrics=batch))["acknowledged"]["next_metric_index"])

    assert send(0, 0, 1, 2) == 3
    assert send(0, 0, 1, 2) == 3, "a heartbeat whose answer was lost"
    assert send(2, 2, 3) == 4, "an overlap"
    assert send(9, 9) == 4, "nothing is taken after a gap"
    assert desk.beat()["assignment"]["next_metric_index"] == 4, "where another process goes on"
    again = {"first_index": 4, "records": [record(2, incarnation=2), record(3, incarnation=2)]}
    desk.beat("t1", report(work, "RUNNING", metrics=again, progress={"step": 4, "total_steps": 100}))
    stored = desk.get("runs/demo/metrics")["metrics"]
    assert [(one["step"], one["incarnation"]) for one in stored] == [(0, 1), (1, 1), (2, 1), (3, 1), (2, 2), (3, 2)]
    run = desk.get("runs/demo")
    assert run["latest_metrics"] == record(3, incarnation=2)
    pace = run["throughput"]
    assert (pace["trainer_tokens_per_second"], pace["data_wait_ratio"]) == (256.0, pytest.approx(0.2))
    assert pace["target_tokens_per_second"] is None
    assert run["progress"] == {"step": 4, "max_steps": 100, "fraction": 0.04, "eta_seconds": 10.0}


def test_strange_numbers_in_records_harm_nobody(desk: Desk) -> None:
    work = desk.running()
    strange = record(0) | {"seconds": 10**400, "eta_seconds": "soon", "tokens_per_second": True}
    desk.beat("t1", report(work, "RUNNING", metrics={"first_index": 0, "records": [strange]}))
    run = desk.get("runs/demo")
    assert (run["throughput"], run["progress"]["eta_seconds"], run["latest_metrics"]["seconds"]) == (
        None,
        None,
        10**400,
    )


def test_what_happened_is_kept_when_the_assignment_is_over(desk: Desk) -> None:
    work = desk.running()
    desk.beat("t1", report(work, "SUCCEEDED"))
    event = {
        "id": "e1",
        "type": "WARMED_UP",
        "message": "12 s",
        "time": "2026-01-01T00:00:00Z",
        "data": {"seconds": 12},
    }
    batch = {"first_index": 0, "records": [record(0)]}
    late = report(work, "SUCCEEDED", metrics=batch, events=[event], checkpoints=[checkpoint(1), checkpoint(2)])
    for _ in range(2):
        assert desk.beat("t1", late)["acknowledged"] == {
            "assignment": work,
            "next_metric_index": 1,
            "next_log_line": 0,
        }
    seen = [one for one in desk.get("runs/demo/events")["events"] if one["type"] in ("WARMED_UP", "CHECKPOINT_SAVED")]
    assert [one["type"] for one in seen] == ["WARMED_UP", "CHECKPOINT_SAVED", "CHECKPOINT_SAVED"]
    assert (seen[0]["source"], seen[0]["time"]) == ("t1", "2026-01-01T00:00:00.000+00:00")
    desk.beat("t1", report(work, "SUCCEEDED", checkpoints=[checkpoint(2)]))
    assert [one["step"] for one in desk.get("runs/demo/checkpoints")["checkpoints"]] == [2]
    assert desk.get("runs/demo")["latest_checkpoint_step"] == 2


def test_reports_of_what_is_not_ones_own(desk: Desk) -> None:
    work = desk.running()
    desk.trainer("t2")
    for assignment in (work, 999):
        answer = desk.beat("t2", report(assignment, "FAILED", exit=GAVE_UP))
        assert (answer["acknowledged"], answer["assignment"]) == (None, None)
    assert desk.state() == "RUNNING"


def test_deleted_while_an_agent_still_reports(client: TestClient, desk: Desk) -> None:
    work = desk.running()
    desk.beat("t1", report(work, "SUCCEEDED"))
    assert client.delete("/v1/runs/demo").status_code == 204
    answer = desk.beat("t1", report(work, "SUCCEEDED"))
    assert (answer["acknowledged"], answer["assignment"]) == (None, None)


def test_the_numbers_of_another_database_are_those_of_other_runs(desk: Desk) -> None:
    work = desk.running()
    mine = desk.beat("t1", report(work, "RUNNING"))["assignment"]["run_uid"]
    batch = {"first_index": 0, "records": [record(0)]}
    answer = desk.beat("t1", report(work, "SUCCEEDED", metrics=batch, run_uid="77"))
    assert answer["acknowledged"] is None and desk.state() == "RUNNING"
    assert desk.get("runs/demo/metrics")["metrics"] == []
    assert desk.beat("t1", report(work, "SUCCEEDED", metrics=batch, run_uid=mine))["acknowledged"] is not None
    assert desk.state() == "SUCCEEDED"


@pytest.mark.parametrize(
    ("message", "remedy", "words"),
    [("no room", "Less.", "no room. Less."), ("No room.", "Less.", "No room. Less."), ("no room", "", "no room")],
)
def test_message_and_remedy_are_two_sentences(desk: Desk, message: str, remedy: str, words: str) -> None:
    failed = GAVE_UP | {"message": message, "remedy": remedy}
    desk.beat("t1", report(desk.running(), "FAILED", exit=failed))
    assert desk.get("runs/demo")["message"] == words


def test_held_out_acceptance_and_transport_of_a_run(desk: Desk) -> None:
    work = desk.running()
    assert desk.get("runs/demo")["heldout"] is None and desk.get("runs/demo")["transport"] is None
    measured = {"heldout_accepted_length": 1.25, "heldout_sources": {"chat": {"accepted_length": 1.5}, "odd": 7}}
    records = [record(0), record(1) | measured, record(2), record(3) | {"heldout_accepted_length": "?"}]
    listed = [
        checkpoint(1) | {"heldout": {"accepted_length": 1.375, "by_source": {"chat": 1.5}}, "is_best": True},
        checkpoint(2),
    ]
    batch = {"first_index": 0, "records": records}
    desk.beat(report=report(work, "RUNNING", metrics=batch, checkpoints=listed, transport="shm"))
    desk.beat(report=report(work, "RUNNING"))
    run = desk.get("runs/demo")
    best = {"step": 1, "accepted_length": 1.375, "by_source": {"chat": 1.5}}
    assert run["transport"] == "shm"
    assert run["heldout"] == {"latest": {"step": 2, "accepted_length": 1.25, "by_source": {"chat": 1.5}}, "best": best}
    rows = desk.get("runs/demo/checkpoints")["checkpoints"]
    assert [(one["heldout"], one["is_best"]) for one in rows] == [(best, True), (None, False)]
    # The best one is another now: that is no new checkpoint.
    events = len(desk.get("runs/demo/events")["events"])
    desk.beat(report=report(work, "RUNNING", checkpoints=[checkpoint(1), listed[0] | {"step": 2}], transport="grpc"))
    run = desk.get("runs/demo")
    assert (run["heldout"]["best"]["step"], run["transport"]) == (2, "grpc")
    assert len(desk.get("runs/demo/events")["events"]) == events + 1, "step 2 lies elsewhere, in this test"


def test_what_was_dropped_of_a_runs_data(desk: Desk) -> None:
    work = desk.running()
    assert desk.get("runs/demo")["data"] is None
    found = ReportBuilder()
    found.read, found.used = 100, 97
    for line in (3, 5, 8):
        found.drop(Finding.ANSWERS_CUT_AWAY, f"a.jsonl:{line}")
    account = found.build("train").account()
    desk.beat(report=report(work, "RUNNING", data=account))
    desk.beat(report=report(work, "RUNNING"))
    said = desk.get("runs/demo")["data"]
    assert (said["read"], said["used"], said["num_dropped"]) == (100, 97, 3)
    (dropped,) = said["dropped"]
    assert (dropped["finding"], dropped["count"], dropped["examples"][0]) == ("answers_cut_away", 3, "a.jsonl:3")
    assert dropped["words"] == Finding.ANSWERS_CUT_AWAY.words


def test_a_run_that_is_to_measure_says_so_before_it_has(desk: Desk) -> None:
    desk.target()
    desk.run(eval={"prompts": "/data/p.jsonl", "heldout": "/data/h.jsonl"})
    assert desk.get("runs/demo")["heldout"] == {"latest": None, "best": None}
