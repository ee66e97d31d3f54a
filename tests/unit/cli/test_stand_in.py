"""A command that another program carries out speaks as the command that was typed."""

import argparse
import os

import pytest

from drafter_trainer.cli import build_parser
from slipstream.cli.main import run_command
from slipstream.stand_in import as_typed
from target_server.cli import run_command as serve


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("slipstream eval", ["eval", "run", "--jobs", "x"]),
        ("slipstream eval", ["eval", "run", "--no-such-flag"]),
        ("slipstream checkpoint export", ["export", "run", "--to", "x"]),
        ("slipstream trainer start", ["worker", "--threads", "x"]),
        ("slipstream data inspect", ["inspect", "file", "--report", "r", "--limit", "x"]),
        ("slipstream data index", ["index", "--no-such-flag"]),
        ("slipstream data regenerate", ["regenerate", "file", "--report", "r", "--batch", "0"]),
    ],
)
def test_errors_name_what_was_typed(
    typed: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, value in as_typed(typed, words[0]).items():
        monkeypatch.setenv(key, value)
    program = serve if typed.startswith("slipstream data") else _train
    with pytest.raises(SystemExit) as left:
        program(words)
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert said.startswith(f"usage: {typed} [-h]") and f"\n{typed}: error: " in said
    assert "drafter-trainer" not in said and "target-server" not in said and "--report FILE" not in said


def _train(words: list[str]) -> argparse.Namespace:
    return build_parser().parse_args(words)


def test_who_starts_the_program_itself_reads_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["eval"])
    assert "drafter-trainer eval: error: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["worker", "eval"])
def test_what_the_program_starts_in_turn_was_typed_by_nobody(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training process that inherited the words would hide flags of its own."""
    words = as_typed("slipstream trainer start", "worker")
    for key, value in words.items():
        monkeypatch.setenv(key, value)
    build_parser().parse_args([command, *(["run"] if command == "eval" else [])])
    assert not words.keys() & os.environ.keys()


def test_through_the_processes(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["eval", "--help"]) == 0
    said = capfd.readouterr()
    assert said.out.startswith("usage: slipstream eval [-h]") and said.err == ""
    assert said.out.count("usage:") == 1 and said.out.index("--prompts") < said.out.index("--api URL")
    assert run_command(["eval"]) == 2
    assert "\nslipstream eval: error: " in capfd.readouterr().err
