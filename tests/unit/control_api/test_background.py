"""The thread behind the reconciler and the prober."""

import threading
from collections.abc import Iterator
from queue import Queue

import pytest

from control_api.background import BackgroundThread
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


class Work:
    """Hands every call to the test, and fails when it is told to."""

    def __init__(self) -> None:
        self.calls: Queue[None] = Queue()
        self.error: Exception | None = None

    def __call__(self) -> None:
        self.calls.put(None)
        if self.error is not None:
            raise self.error


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def thread(work: Work) -> Iterator[BackgroundThread]:
    made = BackgroundThread("test-work", work, seconds=600.0)
    yield made
    made.stop()


def test_works_at_the_start_and_when_woken(thread: BackgroundThread, work: Work) -> None:
    assert not thread.is_alive
    thread.start()
    work.calls.get(timeout=30)
    assert thread.is_alive
    thread.wake()
    work.calls.get(timeout=30)
    thread.stop()
    thread.stop()
    assert not thread.is_alive
    assert work.calls.empty(), "stopping is no reason to work"


def test_works_on_its_own(work: Work) -> None:
    thread = BackgroundThread("test-work", work, seconds=0.01)
    thread.start()
    for _ in range(3):
        work.calls.get(timeout=30)
    thread.stop()


def test_a_failure_is_logged_and_the_work_done_again(
    thread: BackgroundThread, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    work.error = SlipstreamError("the disk is full", reason=Reason.DISK_FULL)
    thread.start()
    work.calls.get(timeout=30)
    thread.wake()
    work.calls.get(timeout=30)
    assert thread.is_alive
    assert "background_work_failed" in caplog.text


def test_a_defect_ends_it(thread: BackgroundThread, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Queue[object] = Queue()
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.put(args.exc_value))
    work.error = ZeroDivisionError()
    thread.start()
    assert isinstance(seen.get(timeout=30), ZeroDivisionError)
    thread.stop()
    assert not thread.is_alive
