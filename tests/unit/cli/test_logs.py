"""One line an event, in words and as JSON."""

import json
import logging
import re
import warnings
from collections.abc import Iterator

import pytest

from slipstream.telemetry.logs import configure_logging, log_event

logger = logging.getLogger("slipstream.test")


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_line_format(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("trainer")
    log_event(logger, logging.INFO, "step_done", step=3, loss=1.23456789, ok=True, why=None, layers=(1, 8), path="a b")
    line = capsys.readouterr().err
    assert re.fullmatch(
        r'\d\d:\d\d:\d\d info trainer step_done step=3 loss=1.23457 ok=true why=- layers=1,8 path="a b"\n', line
    )


@pytest.mark.parametrize(
    ("value", "shown"), [("", '""'), ("a=b", '"a=b"'), ('say "x"', '"say \\"x\\""'), ("two\nlines", '"two\\nlines"')]
)
def test_values_stay_on_one_line(capsys: pytest.CaptureFixture[str], value: str, shown: str) -> None:
    configure_logging("trainer")
    log_event(logger, "warning", "odd", text=value)
    assert capsys.readouterr().err.endswith(f" warning trainer odd text={shown}\n")


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("target", json=True)
    log_event(logger, "info", "pack_ready", sequence_number=7, loss=1.25)
    logging.getLogger("library").warning("two\nlines")
    ours, theirs = map(json.loads, capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", ours.pop("time"))
    assert ours == {"level": "info", "program": "target", "event": "pack_ready", "sequence_number": 7, "loss": 1.25}
    assert (theirs["event"], theirs["logger"], theirs["message"]) == ("log", "library", "two\nlines")


def test_level_and_chatty_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("trainer", level="info")
    log_event(logger, "debug", "hidden")
    # Not transformers: once another test has imported it, it writes its own lines.
    logging.getLogger("urllib3.connectionpool").info("narrates")
    logging.getLogger("urllib3.connectionpool").warning("warns")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("warning trainer log logger=urllib3.connectionpool message=warns")


def test_configuring_again_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("first")
    configure_logging("second", level="debug")
    log_event(logger, "debug", "once")
    (line,) = capsys.readouterr().err.splitlines()
    assert " debug second once" in line


def test_python_warnings_become_records(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("trainer")
    # pytest catches warnings itself; shown as the interpreter would.
    warnings.showwarning(UserWarning("careful"), UserWarning, "file.py", 3)
    (line,) = capsys.readouterr().err.splitlines()
    assert "logger=py.warnings" in line
    assert "careful" in line


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        configure_logging("trainer", level="loud")
    with pytest.raises(AssertionError, match="program"):
        log_event(logger, "info", "event", program="x")
