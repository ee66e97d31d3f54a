"""Who owns a run directory."""

import shutil
import threading
from pathlib import Path

import pytest

from drafter_trainer.run_directory import RunDirectory
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


def test_only_the_newest_claim_may_write(tmp_path: Path) -> None:
    older, newer = RunDirectory(tmp_path), RunDirectory(tmp_path)
    older.claim(1, "trainers/a")
    with older.owned(1):
        assert older.newest_incarnation() == 1
    newer.claim(2, "trainers/b")
    with pytest.raises(SlipstreamError) as refused, older.owned(1):
        pytest.fail("the older incarnation was let in")
    assert refused.value.reason is Reason.INCARNATION_STALE
    assert refused.value.exit_code == 7
    with newer.owned(2):
        assert newer.newest_incarnation() == 2


def test_a_claim_must_be_newer_than_what_is_there(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.claim(5, "trainers/a")
    for incarnation in (4, 5):
        with pytest.raises(SlipstreamError) as refused:
            run.claim(incarnation, "trainers/b")
        assert refused.value.reason is Reason.INCARNATION_STALE
    assert run.newest_incarnation() == 5


def test_a_claim_waits_for_a_write_in_progress(tmp_path: Path) -> None:
    older, newer = RunDirectory(tmp_path), RunDirectory(tmp_path)
    older.claim(1, "trainers/a")
    claimed = threading.Event()

    def take_over() -> None:
        newer.claim(2, "trainers/b")
        claimed.set()

    thread = threading.Thread(target=take_over)
    with older.owned(1):
        thread.start()
        assert not claimed.wait(0.2), "the claim did not wait for the writer"
        assert older.newest_incarnation() == 1
    assert claimed.wait(5.0)
    thread.join()
    assert older.newest_incarnation() == 2


def test_a_used_directory_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.require_unused()
    run.claim(1, "trainers/a")
    run.require_unused()
    run.metrics.write_text("{}\n")
    with pytest.raises(SlipstreamError) as refused:
        run.require_unused()
    assert refused.value.reason is Reason.SPEC_INVALID
    for way_out in ("--resume", "--run-dir", "--set name", "delete"):
        assert way_out in refused.value.remedy


def test_a_damaged_owner_file_is_no_traceback(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "owner.json").write_text("{")
    with pytest.raises(SlipstreamError) as refused:
        run.claim(1, "trainers/a")
    assert refused.value.reason is Reason.CHECKPOINT_INVALID


def test_a_directory_that_was_removed_meanwhile(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.claim(1, "trainers/a")
    shutil.rmtree(run.root)
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(SlipstreamError, match=r"owner\.json is gone") as caught, run.owned(1):
        raise AssertionError("nothing may be written")
    assert caught.value.reason is Reason.CHECKPOINT_INVALID


def test_a_directory_that_is_not_there_any_more(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.claim(1, "trainers/a")
    shutil.rmtree(run.root)
    with pytest.raises(SlipstreamError, match="is gone: somebody has removed") as caught, run.owned(1):
        raise AssertionError("nothing may be written")
    assert caught.value.reason is Reason.CHECKPOINT_INVALID and not run.root.exists()


def test_a_lock_that_cannot_be_opened_is_no_traceback(tmp_path: Path) -> None:
    """As on a disk that the system has made read-only."""
    run = RunDirectory(tmp_path)
    run.claim(1, "trainers/a")
    (tmp_path / "owner.lock").unlink()
    (tmp_path / "owner.lock").mkdir()
    with pytest.raises(SlipstreamError, match=r"owner\.lock could not be written") as caught, run.owned(1):
        raise AssertionError("nothing may be written")
    assert caught.value.reason is Reason.PATH_NOT_ALLOWED
