"""The process boundary of every program: errors become words and an exit status, never a traceback."""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable

from slipstream.child_processes import leave_with_parent
from slipstream.errors import SlipstreamError
from slipstream.telemetry.crash_report import summarize

_INTERRUPTED = 128 + 2
_READER_GONE = 128 + 13


def run_main(program: str, main: Callable[[], int]) -> int:
    """Run `main` and return the exit status of the process; use as `sys.exit(run_main("name", main))`.

    A SlipstreamError is printed with its remedy and gives its own status; Ctrl-C gives 130; a reader of our output
    that went away (`| head`) gives 141, in silence; anything else is a defect: its traceback goes to the crash file,
    one line names it, status 1. The same holds for exceptions that end a thread.
    """
    _keep_tracebacks_off_the_terminal(program)
    _unblock_signals()
    leave_with_parent()
    try:
        status = main()
        _flush_stdout()
    except SlipstreamError as error:
        _say(f"error: {error.message}\n" + (f"  remedy: {error.remedy}\n" if error.remedy else ""))
        status = error.exit_code
    except KeyboardInterrupt:
        _say(f"{program}: interrupted\n")
        status = _INTERRUPTED
    except SystemExit as leaving:
        status = _status_of(leaving)
    except Exception as error:  # noqa: BLE001 - this is the process boundary
        if isinstance(error, BrokenPipeError) and _stdout_has_no_reader():
            status = _READER_GONE
        else:
            _say(f"error: {program} failed unexpectedly: {summarize(program, error)}\n")
            status = 1
    _detach_closed_stdout()
    return status


def _unblock_signals() -> None:
    """Hear SIGTERM and SIGINT, also where the parent had blocked them: a signal mask is inherited, and a service that
    cannot be told to end is killed without saving."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))


def _status_of(leaving: SystemExit) -> int:
    """argparse leaves with a number; a library may leave with a message."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    _say(f"error: {leaving.code}\n")
    return 1


def _say(text: str) -> None:
    if sys.stderr is None:  # started with stderr closed
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        # Nobody reads stderr any more; the exit status still tells.
        return


def _keep_tracebacks_off_the_terminal(program: str) -> None:
    """Report exceptions that end a thread or happen in a finaliser like those of `main`."""

    def thread_failed(failure: threading.ExceptHookArgs) -> None:
        if failure.exc_value is not None and not isinstance(failure.exc_value, SystemExit):
            name = failure.thread.name if failure.thread else "unknown"
            _say(f"error: thread {name} of {program} failed: {summarize(program, failure.exc_value)}\n")

    def finaliser_failed(failure: "sys.UnraisableHookArgs") -> None:
        # Ctrl-C while the process ends anyway.
        if failure.exc_value is not None and not isinstance(failure.exc_value, KeyboardInterrupt):
            _say(f"warning: ignored in {program}: {summarize(program, failure.exc_value)}\n")

    threading.excepthook = thread_failed
    sys.unraisablehook = finaliser_failed


def _stdout_has_no_reader() -> bool:
    """Whether the pipe behind stdout was closed at the other end (a broken socket elsewhere is a defect)."""
    try:
        poller = select.poll()
        poller.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poller.poll(0))
    except (OSError, ValueError):  # stdout is no file
        return False


def _flush_stdout() -> None:
    if sys.stdout is not None:  # None: started with stdout closed
        sys.stdout.flush()


def _detach_closed_stdout() -> None:
    """Let the interpreter's last flush write to nowhere where the reader is gone; else it would print a complaint."""
    try:
        _flush_stdout()
    except (OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
