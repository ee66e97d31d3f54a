"""One assignment from start to end, with real processes in the place of trainers, and time as the test turns it."""

import json
import os
import select
import signal

import pytest

from drafter_trainer.agent.child import LEAVE_SECONDS
from drafter_trainer.agent.work import Work
from tests.fakes.control_plane import SPEC
from tests.unit.agent.conftest import Bench, assignment

STOPPABLE = """
from drafter_trainer.stop_request import StopRequest
with StopRequest() as stop:
    line.on_hang_up(stop.agent_gone)
    record(0)
    stop.event.wait()
    line.ended("stopped")
"""


def save_checkpoint(bench: Bench, step: int) -> None:
    directory = bench.run / "checkpoints" / f"step-{step:08d}"
    directory.mkdir(parents=True)
    (directory / "state.json").write_text(json.dumps({"incarnation": 1, "cursor": {"next_step": step}}))
    (directory / "manifest.json").write_text("{}")


def test_from_start_to_end(bench: Bench) -> None:
    bench.child(
        "print('hello', *sys.argv[1:3], os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "until('joined'); line.joined(3, 9)\n"
        "until('step'); record(3)\n"
        "until('end'); line.ended('finished', 4)\n"
    )
    assert bench.advance()
    bench.until_state("STARTING")
    definition = bench.run / "definition.json"
    assert json.loads(definition.read_text()) == SPEC
    bench.signal("joined")
    bench.until(lambda: bench.work.standing.total_steps == 9)
    assert bench.work.standing.state == "STARTING"
    bench.signal("step")
    bench.until_state("RUNNING")
    bench.signal("end")
    bench.until_state("SUCCEEDED")
    assert bench.work.child is None and bench.work.standing.exit is None
    first, hello, last = bench.log.splitlines()
    assert first.startswith("--- ") and first.endswith("child 1 of this attempt starts")
    assert hello.split() == ["hello", "run", str(definition)]
    assert last.endswith("child 1 of this attempt left with status 0")
    assert not bench.advance(), "nothing more is started"


def test_pause_and_resume_and_stop(bench: Bench) -> None:
    bench.child(STOPPABLE)
    bench.until_state("RUNNING")
    bench.desire("PAUSED")
    bench.until_state("PAUSED")
    bench.desire("RUNNING")
    bench.until(lambda: "child 2 of this attempt starts" in bench.log)
    bench.until_state("RUNNING")
    bench.desire("STOPPED")
    bench.until_state("STOPPED")
    assert bench.work.standing.exit is None


def test_an_agent_that_leaves_stops_also_what_is_paused(bench: Bench) -> None:
    bench.desire("PAUSED")
    bench.until_state("PAUSED")
    assert bench.log == "", "nothing is started to be paused"
    bench.leaving = True
    bench.until_state("STOPPED")


def test_a_process_that_is_told_to_leave_before_it_listens(bench: Bench) -> None:
    bench.child("record(0); until('never')")
    bench.until_state("RUNNING")
    bench.work.is_retired = True
    bench.until_state("STOPPED")
    assert bench.work.standing.exit is None


def test_waiting_for_the_target(bench: Bench) -> None:
    bench.child(
        "line.waits_for_target(Reason.TARGET_UNREACHABLE); until('back')\n"
        "line.waits_for_target(None); line.reads_over('shm'); until('end')"
    )
    bench.until(lambda: bench.work.standing.target_unreachable)
    bench.signal("back")
    bench.until(lambda: not bench.work.standing.target_unreachable and bench.work.standing.transport == "shm")
    bench.signal("end")
    bench.until(lambda: bench.work.standing.exit is not None)


def test_dropped_records_are_an_event_once(bench: Bench) -> None:
    account = {"read": 9, "used": 7, "other_split": 0, "num_dropped": 2,
               "dropped": [{"finding": "x", "words": "too long", "count": 2, "examples": []}]}  # fmt: skip
    bench.child(f"line.data_read({account!r}); record(0); until('again'); line.data_read({account!r}); until('end')")
    bench.until(lambda: bench.work.standing.data == account)
    bench.signal("again")
    bench.signal("end")
    bench.until(lambda: bench.work.standing.exit is not None)
    told = [one for one in bench.work.reporter.build(bench.work.standing)["events"] if one["type"] == "RECORDS_DROPPED"]
    assert [one["message"] for one in told] == ["2 of 9 records gave nothing to learn from. 2: too long."]
    bench.work.reporter.answered({"next_metric_index": 0, "next_log_line": 0})
    assert bench.work.reporter.build(bench.work.standing)["data"] is None, "it was heard"


def test_crashes_are_restarted_later_and_later_until_it_is_enough(bench: Bench) -> None:
    bench.child("print('last words'); os.kill(os.getpid(), signal.SIGSEGV)")
    for number, delay in ((1, 1.0), (2, 2.0), (3, 4.0)):
        bench.until(lambda number=number: (bench.work.standing.exit or {}).get("child") == number)  # type: ignore[misc]
        report = dict(bench.work.standing.exit or {})
        assert (report["exit_code"], report["reason"], report["will_restart"]) == (-signal.SIGSEGV, "INTERNAL", True)
        assert "last words" in report["log_tail"] and "SIGSEGV" in report["message"]
        assert bench.work.standing.state == "STARTING"
        bench.now += delay - 0.01
        bench.advance()
        assert bench.work.child is None, "too early"
        bench.now += 0.02
    bench.until_state("FAILED")
    report = dict(bench.work.standing.exit or {})
    assert (report["child"], report["will_restart"]) == (4, False)
    assert "No checkpoint was saved in the last 4 starts" in report["message"]


def test_a_newer_checkpoint_is_progress(bench: Bench) -> None:
    bench.child("sys.exit(1)")
    for number in range(1, 7):
        bench.until(lambda number=number: (bench.work.standing.exit or {}).get("child") == number)  # type: ignore[misc]
        save_checkpoint(bench, number)
        bench.now += 5.0
    assert bench.work.standing.state == "STARTING"


def test_a_reason_in_words_is_final(bench: Bench) -> None:
    bench.child(
        "with line.failures_told():\n"
        "    raise SlipstreamError('Too large: \\udcff', reason=Reason.OUT_OF_MEMORY, remedy='Make it smaller.')"
    )
    bench.until_state("FAILED")
    report = dict(bench.work.standing.exit or {})
    assert (report["reason"], report["message"], report["remedy"]) == (
        "OUT_OF_MEMORY",
        "Too large: ?",
        "Make it smaller.",
    )
    assert report["will_restart"] is False and report["exit_code"] == 1


def test_a_defect_is_told_and_tried_again(bench: Bench) -> None:
    bench.child("with line.failures_told():\n    raise ZeroDivisionError('by zero')")
    bench.until(lambda: bench.work.standing.exit is not None)
    report = dict(bench.work.standing.exit or {})
    assert report["message"] == "ZeroDivisionError: by zero" and report["will_restart"] is True
    assert "attempt-0002.log" in report["remedy"]


def test_one_that_dies_while_it_should_save_rests_at_its_last_checkpoint(bench: Bench) -> None:
    bench.child("signal.signal(signal.SIGTERM, lambda *_: os._exit(1))\nrecord(0); until('never')")
    bench.until_state("RUNNING")
    bench.desire("PAUSED")
    bench.until_state("PAUSED")
    assert dict(bench.work.standing.exit or {})["will_restart"] is False
    # And it goes on from there when it is wanted again.
    bench.desire("RUNNING")
    bench.until_state("RUNNING")
    bench.work.is_retired = True
    bench.until_state("STOPPED")


def test_one_that_does_not_leave_is_killed_with_all_it_started(bench: Bench) -> None:
    bench.child(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "import subprocess; grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "(run / 'grandchild').write_text(str(grandchild.pid)); record(0); until('never')\n"
    )
    bench.until_state("RUNNING")
    grandchild = os.pidfd_open(int((bench.run / "grandchild").read_text()))
    bench.desire("STOPPED")
    bench.advance()
    bench.now += LEAVE_SECONDS + 1
    bench.until_state("STOPPED")
    assert "did not save and leave" in dict(bench.work.standing.exit or {})["message"]
    assert select.select([grandchild], [], [], 30.0)[0], "the grandchild still runs"
    os.close(grandchild)


def test_a_process_whose_agent_is_gone_leaves_and_is_waited_for(bench: Bench) -> None:
    bench.child(STOPPABLE.replace("    line.ended", "    until('saved')\n    line.ended"))
    bench.until_state("RUNNING")
    orphan = bench.work.child
    assert orphan is not None
    orphan.close()  # what the system does when an agent is killed

    bench.slot = bench.new_slot()
    bench.work = Work(assignment(), bench.place())
    bench.advance()
    assert bench.work.child is None and bench.work.standing.state == "STARTING"
    bench.desire("PAUSED")
    bench.advance()
    assert bench.work.standing.state == "STARTING", "at rest means that all is on disk"
    bench.desire("RUNNING")
    bench.signal("saved")
    bench.until_state("RUNNING")
    assert "child 2 of this attempt starts" in bench.log
    bench.leaving = True
    bench.until_state("STOPPED")


def test_an_orphan_that_stays_is_killed(bench: Bench) -> None:
    bench.child("record(0); until('never')")
    bench.until_state("RUNNING")
    again = bench.new_slot()
    assert not again.is_free(bench.now)
    assert not again.is_free(bench.now + LEAVE_SECONDS + 1)
    bench.until(lambda: bench.work.standing.exit is not None)
    assert again.is_free(bench.now)


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"spec": {"name": "demo"}}, "cpu", "SPEC_INVALID"),
        ({"spec": SPEC | {"train": {"device": "cuda", "max_steps": 1}}}, "cpu", "ENVIRONMENT_UNSUPPORTED"),
        ({"spec": SPEC | {"train": {"attention": "sdpa", "max_steps": 1}}}, "cuda", "ENVIRONMENT_UNSUPPORTED"),
    ],
)
def test_what_this_trainer_cannot_train_is_not_started(
    bench: Bench, changes: dict[str, object], device: str, reason: str
) -> None:
    work = Work(assignment(**changes), bench.place(device))
    assert work.advance(0.0, leaving=False)
    assert work.standing.state == "FAILED"
    report = dict(work.standing.exit or {})
    assert (report["reason"], report["child"], report["exit_code"], report["will_restart"]) == (reason, 1, None, False)
    assert report["message"] and report["remedy"]


def test_a_directory_that_is_a_file(bench: Bench) -> None:
    bench.run.parent.mkdir()
    bench.run.write_text("")
    bench.advance()
    assert bench.work.standing.state == "FAILED"
    assert dict(bench.work.standing.exit or {})["reason"] == "PATH_NOT_ALLOWED"


LEFT_BEHIND = {"step": 5, "incarnation": 1}


@pytest.mark.parametrize("marked", [True, False], ids=["of another database", "started by hand"])
def test_what_another_run_has_left_is_neither_reported_nor_continued(bench: Bench, marked: bool) -> None:
    save_checkpoint(bench, 5)
    (bench.run / "metrics.jsonl").write_text(json.dumps(LEFT_BEHIND) + "\n")
    if marked:
        (bench.run / "run-uid").write_text("77\n")
    before = sorted(bench.run.rglob("*"))
    work = Work(assignment(), bench.place())
    first = work.reporter.build(work.standing)
    assert (first["checkpoints"], "metrics" in first, "progress" in first) == ([], False, False)
    work.advance(bench.now, leaving=False)
    last = work.reporter.build(work.standing)
    assert (last["state"], last["exit"]["reason"]) == ("FAILED", "NAME_TAKEN")
    assert f"echo 5a > {bench.run / 'run-uid'}" in last["exit"]["remedy"]
    assert sorted(bench.run.rglob("*")) == before, "nothing of it is touched"


def test_what_the_run_itself_has_left_is_continued(bench: Bench) -> None:
    bench.child("line.ended('stopped')")
    bench.until(lambda: bench.work.child is None and (bench.run / "run-uid").exists())
    save_checkpoint(bench, 5)
    work = Work(assignment(id=18), bench.place())
    assert work.reporter.build(work.standing)["checkpoints"][0]["step"] == 5
    other = Work(assignment(id=1, run_uid="77"), bench.place())
    assert other.reporter.build(other.standing)["checkpoints"] == []
