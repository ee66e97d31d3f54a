"""How a training process ended, in words; and whether another one is started."""

import signal

import pytest

from drafter_trainer.agent.restarts import RESTARTS, Restarts, explain
from slipstream.run_spec.reasons import Reason

LOG = "/runs/demo/logs/attempt-0001.log"


def told(reason: Reason) -> dict[str, str]:
    return {"end": "failed", "reason": reason.value, "message": "What was found.", "remedy": "What to do."}


@pytest.mark.parametrize(
    "reason",
    [
        Reason.SPEC_INVALID,
        Reason.DATA_INVALID,
        Reason.MODEL_INVALID,
        Reason.TARGET_FINGERPRINT_MISMATCH,
        Reason.STREAM_CHANGED,
        Reason.PATH_NOT_ALLOWED,
        Reason.DISK_FULL,
        Reason.LOSS_NOT_FINITE,
        Reason.ENVIRONMENT_UNSUPPORTED,
        Reason.OUT_OF_MEMORY,
        Reason.INCARNATION_STALE,
        Reason.CHECKPOINT_INVALID,
        Reason.ACCESS_DENIED,
    ],
)
def test_what_another_process_would_meet_again_is_final(reason: Reason) -> None:
    failure = explain(2, told(reason), log=LOG)
    assert (failure.reason, failure.message, failure.remedy) == (reason, "What was found.", "What to do.")
    assert not failure.may_pass


@pytest.mark.parametrize(
    "reason",
    [
        Reason.INTERNAL,
        Reason.PAYLOAD_CORRUPT,
        Reason.TRANSPORT_UNAVAILABLE,
        Reason.DENSE_ATTENTION,
        Reason.PACK_OUTSIDE_BUCKETS,
    ],
)
def test_what_may_pass_is_tried_again(reason: Reason) -> None:
    assert explain(1, told(reason), log=LOG).may_pass


def test_a_reason_of_a_newer_version_is_an_internal_one() -> None:
    assert explain(1, told(Reason.INTERNAL) | {"reason": "MOON_PHASE"}, log=LOG).reason is Reason.INTERNAL


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (-signal.SIGKILL, ("SIGKILL", "ran out of memory")),
        (-signal.SIGSEGV, ("SIGSEGV",)),
        (-63, ("signal 63",)),
        (1, ("status 1",)),
        (0, ("not by its agent",)),
    ],
)
def test_a_process_that_said_nothing(status: int, words: tuple[str, ...]) -> None:
    failure = explain(status, {"total_steps": 9}, log=LOG)
    assert (failure.reason, failure.exit_code, failure.may_pass) == (Reason.INTERNAL, status, True)
    assert all(word in failure.message + failure.remedy for word in (*words, LOG))


def test_a_stream_that_ended_early_is_final() -> None:
    failure = explain(0, {"end": "exhausted", "next_step": 7, "total_steps": 9}, log=LOG)
    assert failure.reason is Reason.STREAM_CHANGED and not failure.may_pass
    assert "step 7 of 9" in failure.message


def test_so_many_restarts_without_a_newer_checkpoint() -> None:
    restarts = Restarts((1, 5))
    waits = [restarts.seconds_before_next((1, 5)) for _ in range(RESTARTS + 1)]
    assert waits == [1.0, 2.0, 4.0, None]


def test_a_newer_checkpoint_begins_the_count_anew() -> None:
    restarts = Restarts(None)
    assert [restarts.seconds_before_next(None) for _ in range(3)] == [1.0, 2.0, 4.0]
    assert [restarts.seconds_before_next((1, 10)) for _ in range(2)] == [1.0, 2.0]
    # An older step under a newer incarnation is progress, an older incarnation is none.
    assert restarts.seconds_before_next((2, 5)) == 1.0
    assert restarts.seconds_before_next((1, 99)) == 2.0
    assert restarts.seconds_before_next(None) == 4.0
    assert restarts.seconds_before_next((2, 5)) is None
