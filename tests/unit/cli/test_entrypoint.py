"""The process boundary in real processes: words and a status on the terminal, tracebacks in a file."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def crashes(tmp_path: Path) -> Path:
    return tmp_path / "crashes"


def run(body: str, crashes: Path, shell: str = "") -> subprocess.CompletedProcess[str]:
    """Run `main` with the given body behind run_main in a process of its own; `shell` is put after the command."""
    lines = "\n    ".join(body.splitlines())
    script = crashes.parent / "program.py"
    script.write_text(
        "import logging, os, sys, threading\n"
        "from slipstream.entrypoint import run_main\n"
        "from slipstream.errors import SlipstreamError\n"
        "from slipstream.run_spec.reasons import Reason\n"
        "from slipstream.telemetry.logs import configure_logging, log_event\n"
        f"def main() -> int:\n    {lines}\n    return 0\n"
        'sys.exit(run_main("program", main))\n'
    )
    environment = os.environ | {
        "SLIPSTREAM_CRASH_DIR": str(crashes),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = f"exec {sys.executable} {script}" if not shell else f"{sys.executable} {script} {shell}"
    finished = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=30, check=False
    )
    assert "Traceback" not in finished.stdout + finished.stderr
    assert "Exception ignored" not in finished.stderr
    return finished


def report(crashes: Path) -> str:
    (file,) = crashes.iterdir()
    assert file.stat().st_mode & 0o077 == 0, "a report may show private data"
    return file.read_text()


def test_status_of_main_is_the_status_of_the_process(crashes: Path) -> None:
    finished = run("print('done')\nreturn 5", crashes)
    assert (finished.returncode, finished.stdout, finished.stderr) == (5, "done\n", "")


def test_slipstream_error_prints_message_and_remedy(crashes: Path) -> None:
    finished = run("raise SlipstreamError('No room.', reason=Reason.DISK_FULL, remedy='Free 3 GB.')", crashes)
    assert (finished.returncode, finished.stderr) == (5, "error: No room.\n  remedy: Free 3 GB.\n")
    finished = run("raise SlipstreamError('No room.', reason=Reason.INTERNAL)", crashes)
    assert (finished.returncode, finished.stderr) == (1, "error: No room.\n")
    assert not crashes.exists()


def test_interrupt_gives_130(crashes: Path) -> None:
    finished = run("import signal; os.kill(os.getpid(), signal.SIGINT)\nthreading.Event().wait(20)", crashes)
    assert (finished.returncode, finished.stderr) == (130, "program: interrupted\n")


def test_unforeseen_exception_goes_to_the_crash_file(crashes: Path) -> None:
    finished = run("raise RuntimeError('first line\\nsecond line')", crashes)
    assert finished.returncode == 1
    (line,) = finished.stderr.splitlines()
    assert line.startswith("error: program failed unexpectedly: RuntimeError: first line (traceback: ")
    text = report(crashes)
    assert str(next(crashes.iterdir())) in line
    assert "Traceback (most recent call last)" in text
    assert "second line" in text


def test_crash_file_that_cannot_be_written_is_said(crashes: Path) -> None:
    crashes.write_text("not a directory")
    finished = run("raise RuntimeError('boom')", crashes)
    assert finished.returncode == 1
    assert "RuntimeError: boom (the traceback could not be kept: " in finished.stderr


def test_exit_of_a_library_keeps_its_status(crashes: Path) -> None:
    assert run("sys.exit(2)", crashes).returncode == 2
    finished = run("sys.exit('no such option')", crashes)
    assert (finished.returncode, finished.stderr) == (1, "error: no such option\n")


def test_reader_of_stdout_that_left_is_no_error(crashes: Path) -> None:
    # More than a pipe holds, so that a write fails whenever `true` leaves.
    finished = run("for number in range(100_000):\n    print(number)", crashes, shell="| true; echo ${PIPESTATUS[0]}")
    assert (finished.stdout, finished.stderr) == ("141\n", "")
    assert not crashes.exists()


def test_few_bytes_for_a_reader_that_left(crashes: Path) -> None:
    # Nothing fails before the last flush: the buffer holds it all.
    script = "import os, sys\nread, write = os.pipe()\nos.dup2(write, 1)\nos.close(write)\nos.close(read)\nprint('few')"
    finished = run(script, crashes)
    assert (finished.returncode, finished.stderr) == (141, "")


def test_broken_pipe_elsewhere_is_a_defect(crashes: Path) -> None:
    finished = run("read, write = os.pipe()\nos.close(read)\nos.write(write, b'x')", crashes)
    assert finished.returncode == 1
    assert "BrokenPipeError" in finished.stderr


@pytest.mark.parametrize("stream", [">&-", "2>&-"])
def test_closed_streams_are_survived(crashes: Path, stream: str) -> None:
    finished = run("print('x')\nraise SlipstreamError('m', reason=Reason.DISK_FULL)", crashes, shell=stream)
    assert finished.returncode == 5
    assert not crashes.exists()


def test_exception_in_a_thread_and_in_a_finaliser(crashes: Path) -> None:
    finished = run(
        "def fail(): raise ValueError('in thread')\n"
        "thread = threading.Thread(target=fail, name='feeder'); thread.start(); thread.join()\n"
        "class Bad:\n    def __del__(self): raise ValueError('in finaliser')\n"
        "Bad()",
        crashes,
    )
    first, second = finished.stderr.splitlines()
    assert first.startswith("error: thread feeder of program failed: ValueError: in thread (traceback: ")
    assert second.startswith("warning: ignored in program: ValueError: in finaliser (traceback: ")
    assert report(crashes).count("Traceback (most recent call last)") == 2


def test_an_interrupt_while_the_process_ends_is_nothing_new(crashes: Path) -> None:
    finished = run("import atexit\ndef late(): raise KeyboardInterrupt\natexit.register(late)\nreturn 130", crashes)
    assert (finished.returncode, finished.stderr) == (130, "")
    assert not crashes.exists()


def test_logged_exception_is_one_line(crashes: Path) -> None:
    finished = run(
        "configure_logging('program')\n"
        "try:\n    1 / 0\n"
        "except ZeroDivisionError:\n    logging.getLogger('grpc._server').exception('Exception calling application')",
        crashes,
    )
    (line,) = finished.stderr.splitlines()
    assert ' error program log logger=grpc._server message="Exception calling application" exception="Zero' in line
    assert "1 / 0" in report(crashes)


def test_log_record_that_cannot_be_formatted_is_one_line(crashes: Path) -> None:
    finished = run("configure_logging('program')\nlogging.getLogger('x').warning('%d', 'seven')", crashes)
    (line,) = finished.stderr.splitlines()
    assert line.startswith("a log record of x (line ")


def test_a_program_hears_sigterm_although_its_parent_had_blocked_it() -> None:
    source = (
        "import signal, sys, time\n"
        "from slipstream.entrypoint import run_main\n"
        "def main():\n"
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "    print('ready', flush=True)\n"
        # Not pause(): a signal that comes just before it would not end it.
        "    while True: time.sleep(0.1)\n"
        "sys.exit(run_main('program', main))\n"
    )
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        program = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    with program:
        try:
            assert program.stdout is not None and program.stdout.readline() == "ready\n"
            program.terminate()
            assert program.wait(timeout=20) == 7
        finally:
            program.kill()
