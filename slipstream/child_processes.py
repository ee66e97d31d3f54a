"""Programs that start programs: what they started ends with them, on an error, on Ctrl-C, on SIGTERM, when killed."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO

SIGTERM_STATUS = 128 + signal.SIGTERM
_PARENT_LINE = "SLIPSTREAM_PARENT_FD"
"""Names a pipe to a child: the system closes its other end when the parent dies, however that happens."""
_WAKE_SECONDS = 0.05
_LEAVE_SECONDS = 30.0
"""How long a child may take to save its work and leave."""


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Within, SIGTERM raises SystemExit(143) in the main thread, so that `finally` and `with` do their work.

    Further SIGTERMs are ignored: they would break off just that work. Main thread only.
    """

    def leave(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(SIGTERM_STATUS)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def child_process(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, output: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, which must be one of ours; on leaving, it is asked to end if it still runs, then made to.

    It also ends when this process is killed: see `leave_with_parent`.

    Args:
        command: program and arguments.
        environment: what it sees besides this process's environment.
        output: takes stdout and stderr; None: those of this process.
    """
    process: subprocess.Popen[bytes] | None = None
    line, held = os.pipe()
    try:
        # A signal between the child's start and the assignment would leave a child that nobody knows. The child
        # inherits the block; `run_main` of every program lifts it.
        with _signals_held():
            process = subprocess.Popen(
                list(command),
                env={**os.environ, **(environment or {}), _PARENT_LINE: str(line)},
                pass_fds=(line,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        yield process
    finally:
        try:
            if process is not None:
                end_process(process)
        finally:
            os.close(line)
            os.close(held)


def leave_with_parent() -> None:
    """In a process that `child_process` started: end as at SIGTERM once the parent is gone. Call it first of all."""
    named = os.environ.pop(_PARENT_LINE, None)  # what this process starts has another parent
    if named is None:
        return
    line = int(named)
    os.set_inheritable(line, False)
    threading.Thread(target=_wait_for_parent, args=(line,), name="parent-line", daemon=True).start()


def _wait_for_parent(line: int) -> None:
    os.read(line, 1)  # the parent never writes: what can be read is the end
    # The main thread must be the one that is woken, since it runs the handlers.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(_LEAVE_SECONDS)
    os._exit(SIGTERM_STATUS)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM; SIGKILL where that does not end it in time, or where waiting is interrupted."""
    try:
        if _end_of(process) is None:
            process.terminate()
            _wait_for_end(process, _LEAVE_SECONDS)
    finally:
        if _end_of(process) is None:
            process.kill()
            _wait_for_end(process, None)
        process.poll()  # the system forgets it


def exit_status(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end; the status as a shell would give it: 128 + signal for a killed process."""
    status = _wait_for_end(process, None)
    assert status is not None
    return status if status >= 0 else 128 - status


def _wait_for_end(process: subprocess.Popen[bytes], seconds: float | None) -> int | None:
    """As `_end_of`, after so many seconds at the latest."""
    # In small steps, since Python runs a signal's handler in this thread, and not before it wakes up; a kernel may let
    # another thread take the signal.
    until = None if seconds is None else time.monotonic() + seconds
    while (status := _end_of(process)) is None and (until is None or time.monotonic() < until):
        time.sleep(_WAKE_SECONDS)
    return status


def _end_of(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit status, negative for a signal; None while it runs.

    Without a lock: `Popen.poll` and `wait` take one, and an exception that a signal's handler raises between taking it
    and entering its `try` leaves it locked. Whoever waits for the process then waits for ever, also once it has ended.
    """
    if process.returncode is not None:
        return process.returncode
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        # Somebody else has waited for it, and keeps what it left with.
        return process.poll() or 0
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def one_gpu() -> dict[str, str]:
    """Environment in which a child sees only the first of the GPUs that this process sees."""
    return {"CUDA_VISIBLE_DEVICES": visible_gpu(0)}


def visible_gpu(index: int, environment: Mapping[str, str] = os.environ) -> str:
    """What CUDA_VISIBLE_DEVICES must be for a child that shall see only this one of the GPUs that this process sees."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(index)
    # One that is not in the list stays hidden.
    return dict(enumerate(name.strip() for name in visible.split(","))).get(index, "")


@contextmanager
def _signals_held() -> Iterator[None]:
    held = (signal.SIGTERM, signal.SIGINT)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
