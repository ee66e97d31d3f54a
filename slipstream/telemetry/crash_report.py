"""Where tracebacks go: a file that can be sent in, never the user's terminal."""

import os
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path

from slipstream import __version__

# A thread that fails in a loop must not fill the disk.
_MAX_REPORTS = 50
_reports_written = 0


def crash_directory() -> Path:
    """`SLIPSTREAM_CRASH_DIR`, or the system's directory for temporary files."""
    return Path(os.environ.get("SLIPSTREAM_CRASH_DIR") or tempfile.gettempdir())


def write_crash_report(program: str, error: BaseException) -> Path:
    """Append the traceback of `error` to this process's crash file and return its path.

    Raises:
        OSError: the file cannot be written.
    """
    global _reports_written
    path = crash_directory() / f"slipstream-crash-{program}-{os.getpid()}.txt"
    if _reports_written >= _MAX_REPORTS:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name can be guessed and the directory may be everyone's: a report is private, and a link is not followed.
    mode = os.O_APPEND if _reports_written else os.O_TRUNC
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | mode, 0o600)
    with os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(
            f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {program} slipstream {__version__}\n"
            f"python {platform.python_version()} on {platform.platform()}\n"
            f"command line: {sys.argv}\n"
            f"{''.join(traceback.format_exception(error))}\n"
        )
    _reports_written += 1
    return path


def summarize(program: str, error: BaseException) -> str:
    """One line for the terminal: what failed and where the traceback is (or why it could not be kept)."""
    text = str(error).strip().split("\n")[0]
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    try:
        path = write_crash_report(program, error)
    except OSError as refused:
        return f"{what} (the traceback could not be kept: {refused})"
    return f"{what} (traceback: {path})"
