"""What decides the speed of a run, from two shares; and a share from counters that only grow."""

import pytest

from control_api.bottleneck import WaitMeter, bottleneck
from control_api.target_visit import StreamStats


@pytest.mark.parametrize(
    ("data_wait", "target_wait", "expected"),
    [
        (0.0, None, "TRAINER"),
        (0.05, 1.0, "TRAINER"),
        (0.051, None, "BALANCED"),
        (0.199, 1.0, "BALANCED"),
        (0.2, None, None),
        (0.2, 0.1, "TARGET"),
        (0.9, 0.95, "TARGET"),
        (0.2, 0.099, "WIRE"),
        (1.0, 0.0, "WIRE"),
    ],
)
def test_the_rule(data_wait: float, target_wait: float | None, expected: str | None) -> None:
    assert bottleneck(data_wait, target_wait) == expected


def look(wait: float, serving: float) -> StreamStats:
    return StreamStats(tokens_per_second=1.0, wait_seconds=wait, serving_seconds=serving)


def test_the_share_between_two_looks() -> None:
    meter = WaitMeter()
    assert meter.share("a", look(100.0, 1000.0)) is None, "what was before the first look is not known to be recent"
    assert meter.share("a", look(101.0, 1004.0)) is None, "too soon"
    assert meter.share("a", look(104.0, 1008.0)) == 0.5
    assert meter.share("a", look(105.0, 1009.0)) == 0.5, "too soon: the last one holds"
    assert meter.share("a", look(104.0, 1018.0)) == 0.0
    assert meter.share("b", look(0.0, 1.0)) is None


def test_another_server_counts_anew() -> None:
    meter = WaitMeter()
    meter.share("a", look(0.0, 100.0))
    assert meter.share("a", look(10.0, 110.0)) == 1.0
    assert meter.share("a", look(0.0, 1.0)) is None
    assert meter.share("a", look(1.0, 11.0)) == 0.1
    meter.keep({"b"})
    assert meter.share("a", look(2.0, 30.0)) is None
