"""Stacks that run in the background: started, waited for, stopped; also for the length of a `with` block."""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slipstream.errors import SlipstreamError
from slipstream.launcher.ending import end_in_order, end_strays, found_alive
from slipstream.launcher.home import Home, SupervisorState, is_held, locked, read_supervisor, take_over
from slipstream.launcher.liveness import holders, marked, open_handles
from slipstream.launcher.planning import with_addresses
from slipstream.launcher.processes import log_tail
from slipstream.launcher.stack import Stack, read_stack, write_stack
from slipstream.run_spec.reasons import Reason

_LOOK_SECONDS = 0.1
_FIND_SECONDS = 30.0
_SUPERVISOR = "supervisor"
_DISK_FULL = SlipstreamError("", reason=Reason.DISK_FULL).exit_code

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunningStack:
    """A stack that is up."""

    api_address: str
    """`http://HOST:PORT`"""
    dashboard_url: str
    token_file: Path | None


@contextmanager
def running_stack(stack: Stack, home: Path, *, say: Say = lambda _sentence: None) -> Iterator[RunningStack]:
    """A stack that is up while the block is open, and stopped in order when it is left; also when this process is
    killed meanwhile.

    Args:
        stack: as `planning.plan_stack` makes it.
        home: nothing may be up in it.
        say: takes sentences about what happens until all is ready.

    Raises:
        SlipstreamError: STACK_DIFFERS, a stack is up there already; PORT_IN_USE; STACK_FAILED, with the end of a log.
    """
    lock = take_over(home)
    if lock is None:
        raise SlipstreamError(
            f"a stack is up in {home} already",
            reason=Reason.STACK_DIFFERS,
            remedy=f"Stop it with `slipstream down --home {home}`, or take another home.",
        )
    with lock:
        prepare(stack, home)
        supervisor = start_supervisor(home, lock, while_open=True)
    try:
        state = wait_until_ready(supervisor, home, say)
        token_file = Path(state.token_file) if state.token_file else None
        yield RunningStack(state.api, state.dashboard, token_file)
    finally:
        _let_go(supervisor)


def prepare(stack: Stack, home: Path) -> Stack:
    """Settle the addresses and write stack.json. Only for who holds supervisor.lock.

    Raises:
        SlipstreamError: PORT_IN_USE; PATH_NOT_ALLOWED, the home cannot be written.
    """
    places = Home(home)
    places.make()
    settled = with_addresses(stack, read_stack(home), lambda name: is_held(places.locks / f"{name}.lock"))
    with locked(places.stack_lock):
        write_stack(home, settled)
    # Of an earlier stack: nobody may take it for this one's.
    places.supervisor_file.unlink(missing_ok=True)
    return settled


def start_supervisor(home: Path, lock: IO[bytes], *, while_open: bool = False) -> "subprocess.Popen[bytes]":
    """Start the supervisor in the background; it inherits the lock, which may then be closed here.

    Args:
        home: prepared.
        lock: the home's supervisor.lock.
        while_open: stop the stack once the process's stdin is closed, which also happens when this process dies.
    """
    flags = ["--home", str(home), "--lock-fd", str(lock.fileno())]
    with Home(home).log_file(_SUPERVISOR).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "slipstream.launcher", *flags, *(["--while-stdin-open"] * while_open)],
            stdin=subprocess.PIPE if while_open else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home,
            pass_fds=(lock.fileno(),),
            start_new_session=True,
        )


def wait_until_ready(supervisor: "subprocess.Popen[bytes]", home: Path, say: Say) -> SupervisorState:
    """Wait, for as long as a model takes to load, until every process is ready.

    Raises:
        SlipstreamError: STACK_FAILED, a process was given up (the others go on running), or the supervisor has ended.
    """
    said: dict[str, str] = {}
    while True:
        has_ended = supervisor.poll() is not None
        state = read_supervisor(home)
        if has_ended:
            if supervisor.returncode == 0:
                raise SlipstreamError(
                    "the stack was stopped while it came up",
                    reason=Reason.STACK_FAILED,
                    remedy=f"`slipstream up --home {shlex.quote(str(home))}` brings it up again.",
                )
            if supervisor.returncode == _DISK_FULL:  # then its log does not say so
                raise SlipstreamError(
                    f"the disk of {home} is full", reason=Reason.DISK_FULL, remedy="Free some space, or give --home."
                )
            raise SlipstreamError(
                f"the supervisor has ended; the end of {Home(home).log_file(_SUPERVISOR)}:\n"
                f"{log_tail(Home(home).log_file(_SUPERVISOR))}",
                reason=Reason.STACK_FAILED,
                remedy="Mend what it names, then bring the stack up again.",
            )
        if state is not None and state.pid == supervisor.pid:
            _say_news(state, said, say)
            if state.state == "READY":
                return state
            if state.state == "DEGRADED":
                raise given_up(state, home)
        time.sleep(_LOOK_SECONDS)


def given_up(state: SupervisorState, home: Path) -> SlipstreamError:
    """That processes were given up, and why."""
    lost = [process for process in state.processes if process.state == "GAVE_UP"]
    return SlipstreamError(
        "\n".join(f"{process.name} was given up: {process.problem}" for process in lost),
        reason=Reason.STACK_FAILED,
        remedy=f"The others go on running. Mend what it names, then `slipstream up --home {home}` starts it again; "
        f"`slipstream down --home {home}` stops everything.",
    )


def stop(home: Path, say: Say) -> bool:
    """Stop the stack of a home in order, whether its supervisor is alive or not; False when nothing ran.

    Raises:
        SlipstreamError: STACK_FAILED, something could not be ended.
    """
    places = Home(home)
    if not places.root.is_dir():
        return False
    ran = False
    while (lock := take_over(home)) is None:
        ran = True
        _stop_supervisor(home, say)
    with lock:
        # Whatever a supervisor that was killed has left.
        leftovers = found_alive(places, say)
        ran |= bool(leftovers or marked(places.root))
        end_in_order(leftovers, say=say, hurry=lambda: False)
        clean = end_strays(places, say=say, hurry=lambda: False)
        places.supervisor_file.unlink(missing_ok=True)
    if not clean:
        raise SlipstreamError(
            f"processes of {home} could not be ended", reason=Reason.STACK_FAILED, remedy="Try it as their user."
        )
    return ran


def _stop_supervisor(home: Path, say: Say) -> None:
    """Ask the supervisor to stop the stack, and wait for its end."""
    lock = Home(home).supervisor_lock
    deadline = time.monotonic() + _FIND_SECONDS
    while time.monotonic() < deadline:
        if not is_held(lock):
            return
        # Who only looks at the lock has it open for a moment too: the supervisor is the one that says so.
        state = read_supervisor(home)
        if state is not None and state.pid in holders(lock):
            for handle in open_handles([state.pid]):
                say(f"supervisor (process {state.pid}): stops the stack in order; trainers save first")
                handle.send(signal.SIGTERM)
                while not handle.has_ended(_FIND_SECONDS):
                    pass
                handle.close()
            return
        time.sleep(_LOOK_SECONDS)
    raise SlipstreamError(
        f"{lock} is held, but by no supervisor that says so",
        reason=Reason.STACK_FAILED,
        remedy="A stack that is just being brought up has to come that far first: try again.",
    )


def _let_go(supervisor: "subprocess.Popen[bytes]") -> None:
    """Let the supervisor stop the stack, and wait for it; Ctrl-C makes it hurry."""
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    try:
        supervisor.wait()
    except KeyboardInterrupt:
        for _ in range(2):
            supervisor.send_signal(signal.SIGTERM)
        supervisor.wait()
        raise


def _say_news(state: SupervisorState, said: dict[str, str], say: Say) -> None:
    """What changed of each process since the last time."""
    for process in state.processes:
        words = "ready" if process.state == "READY" else f"{process.state.lower()}: {process.problem or 'starts'}"
        if said.get(process.name) != words and process.state != "GAVE_UP":
            say(f"{process.name}: {words}")
        said[process.name] = words
