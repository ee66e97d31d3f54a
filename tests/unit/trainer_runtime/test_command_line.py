"""The command line before torch, and the signals."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from drafter_trainer.cli import main
from drafter_trainer.stop_request import StopRequest
from tests.fakes.processes import ManagedProcess

RECIPE = """
name = "tiny"
[target]
model = "m"
[data]
files = ["c.jsonl"]
[train]
max_steps = 5
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


def test_a_dry_run_prints_the_resolved_run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(recipe), "--set", "train.max_steps=7", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "max_steps = 7" in output and "# override" in output and "tiny.toml:" in output


def test_a_missing_target_is_a_usage_error(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(recipe)]) == 2
    assert "--target" in capsys.readouterr().err


def test_an_empty_directory_is_not_the_present_one(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(recipe), "--target", "h:1", "--run-dir", ""]) == 2
    assert "argument --run-dir: it is empty" in capsys.readouterr().err


def test_a_bad_recipe_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.toml"
    recipe.write_text(RECIPE + "max_stepz = 3\n")
    program = (
        "import sys; from drafter_trainer.cli import main; "
        f"status = main(['run', {str(recipe)!r}, '--target', 'h:1']); "
        "print(status, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=Path.cwd())
    assert result.stdout.split() == ["2", "False"], result
    assert "max_stepz" in result.stderr and "max_steps" in result.stderr and "Traceback" not in result.stderr


def test_a_signal_that_another_thread_takes_is_heard_while_the_main_thread_sleeps() -> None:
    program = (
        "import signal, threading; from drafter_trainer.stop_request import StopRequest\n"
        "def take(): signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
        "with StopRequest() as stop:\n"
        "    stop.add_listener(lambda: threading.Thread(target=take).start())\n"
        "    threading.Timer(0.2, take).start()\n"
        "    threading.Event().wait()\n"
    )
    with ManagedProcess([sys.executable, "-c", program]) as process:
        assert process.wait_exit() == 128 + signal.SIGTERM


def test_the_first_signal_asks_and_the_second_leaves_at_once() -> None:
    program = (
        "import os, threading; from drafter_trainer.stop_request import StopRequest\n"
        "with StopRequest() as stop:\n"
        # One write a line: two threads speak at once.
        "    stop.add_listener(lambda: os.write(1, b'told\\n'))\n"
        "    os.write(1, b'ready\\n')\n"
        "    stop.event.wait(30); os.write(1, f'asked {stop.event.is_set()}\\n'.encode())\n"
        "    threading.Event().wait(30)\n"
    )
    with ManagedProcess([sys.executable, "-c", program]) as process:
        process.wait_for_line("^ready$")
        process.terminate()
        process.wait_for_line("^told$")
        process.wait_for_line("^asked True$")
        process.terminate()
        assert process.wait_exit() == 128 + signal.SIGTERM


def test_no_thread_of_a_stop_request_outlives_it() -> None:
    """One that wakes up while the interpreter ends aborts the process."""
    for _ in range(20):
        with StopRequest() as stop:
            assert any(thread.name == "stop-request" for thread in threading.enumerate())
        assert not any(thread.name == "stop-request" for thread in threading.enumerate())
        assert not stop.event.is_set()
