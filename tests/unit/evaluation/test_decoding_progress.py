"""Progress where nobody sees a bar."""

import logging

import pytest

from drafter_trainer.evaluation.decoding_progress import with_lines


@pytest.mark.parametrize(("every_seconds", "lines"), [(0.0, 3), (3600.0, 1)])
def test_a_line_now_and_then_and_one_at_the_end(
    caplog: pytest.LogCaptureFixture, every_seconds: float, lines: int
) -> None:
    with caplog.at_level(logging.INFO):
        assert list(with_lines("abc", 3, every_seconds)) == ["a", "b", "c"]
    assert len(caplog.records) == lines
    assert "3/3" in str(vars(caplog.records[-1]))
