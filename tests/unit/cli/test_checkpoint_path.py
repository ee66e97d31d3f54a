"""RUN[@STEP] at the command line: a path goes on as it is, a run is asked for at the control API."""

import argparse
from pathlib import Path

import pytest

from slipstream.cli.checkpoint_path import checkpoint_path
from slipstream.cli.commands import eval as eval_command
from tests.fakes.control_plane import Desk, checkpoint, report
from tests.unit.cli.conftest import Command


class Started(Exception):  # noqa: N818 - no error
    """The evaluation would begin now."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Arguments of the evaluations that began."""
    commands: list[list[str]] = []

    def run_for(_typed: str, _module: str, arguments: list[str]) -> None:
        commands.append(arguments[1:])
        raise Started

    monkeypatch.setattr(eval_command, "run_for", run_for)
    return commands


@pytest.fixture
def saved(desk: Desk, tmp_path: Path) -> list[Path]:
    """Two checkpoints of run demo, on this machine."""
    paths = [tmp_path / "checkpoints" / f"step-{step:08d}" for step in (20, 40)]
    for path in paths:
        path.mkdir(parents=True)
    listed = [checkpoint(step) | {"path": str(path)} for step, path in zip((20, 40), paths, strict=True)]
    desk.beat(report=report(desk.running(), "RUNNING", checkpoints=listed))
    return paths


def evaluate(slipstream: Command, *arguments: str) -> None:
    with pytest.raises(Started):
        slipstream("eval", *arguments)


def test_eval_of_a_run_by_its_name(slipstream: Command, saved: list[Path], started: list[list[str]]) -> None:
    evaluate(slipstream, "demo", "--prompts", "p.jsonl")
    evaluate(slipstream, "demo@20", "--graphs")
    (saved[0].parent / "best").symlink_to(saved[0].name)
    evaluate(slipstream, "demo@best")
    assert started == [
        [str(saved[1]), "--prompts", "p.jsonl"],
        [str(saved[0]), "--graphs"],
        [str(saved[0])],
    ]


def test_eval_of_a_path_asks_nobody(slipstream: Command, started: list[list[str]]) -> None:
    evaluate(slipstream, "runs/demo@20", "--api", "http://127.0.0.1:1", "--jobs", "2")
    evaluate(slipstream, "--help")
    assert started == [["runs/demo@20", "--jobs", "2"], ["--help"]]


def test_refusals(slipstream: Command, saved: list[Path]) -> None:
    answer = slipstream("eval", "demo@30")
    assert (answer.status, "no checkpoint of step 30, expected one of: 20, 40" in answer.err) == (11, True)
    answer = slipstream("eval", "demo@best")
    assert (answer.status, "run demo has no best checkpoint" in answer.err) == (11, True)
    answer = slipstream("eval", "dmo")
    assert answer.status == 13
    assert "There is no run 'dmo'" in answer.err and "nor is there dmo, runs/dmo, " in answer.err
    assert "Did you mean demo?" in answer.err
    for path in saved:
        path.rmdir()
    saved[0].parent.rmdir()
    answer = slipstream("eval", "demo")
    assert answer.status == 11 and f"Do it there: slipstream eval {saved[1]}" in answer.err


def test_a_best_one_that_is_not_reported_yet(slipstream: Command, saved: list[Path]) -> None:
    (saved[0].parent / "step-00000060").mkdir()
    (saved[0].parent / "best").symlink_to("step-00000060")
    answer = slipstream("eval", "demo@best")
    assert (answer.status, "run demo has no best checkpoint" in answer.err) == (11, True)


def test_what_lies_here_is_taken_where_no_api_knows_the_run(
    desk: Desk, slipstream: Command, started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.target()
    desk.run("another")
    checkpoint = tmp_path / "home" / "runs" / "old" / "checkpoints" / "step-00000005"
    checkpoint.mkdir(parents=True)
    evaluate(slipstream, "old@5", "--home", str(tmp_path / "home"))
    assert started == [[str(checkpoint)]]
    answer = slipstream("eval", "old@7", "--home", str(tmp_path / "home"))
    assert (answer.status, "old has no checkpoint of step 7, expected one of: 5" in answer.err) == (11, True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    evaluate(slipstream, "here@latest")
    assert started[1:] == [["here"]]
    # Nor is there one: nothing listens on port 1.
    monkeypatch.setattr("slipstream.control_client._wait_before", lambda _attempt: None)
    access = argparse.Namespace(api="http://127.0.0.1:1", token_file=None, home=tmp_path / "home")
    assert checkpoint_path(access, "old", "eval {}") == str(tmp_path / "home" / "runs" / "old")
