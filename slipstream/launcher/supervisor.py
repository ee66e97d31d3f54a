"""The supervisor: makes what stack.json wants so, keeps it so, and writes what is into supervisor.json.

One thread, one loop. It waits for the end of a process, a signal, or the next moment at which something is due; what
changed is found by looking, never by being told, so a supervisor that is killed and started again goes on.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from slipstream.errors import SlipstreamError
from slipstream.launcher.ending import TRAINER_GRACE_SECONDS, end_in_order, end_strays, found_alive
from slipstream.launcher.home import Home, StackState, SupervisorState, write_text
from slipstream.launcher.liveness import wait_for_any
from slipstream.launcher.processes import RestartPolicy, SupervisedProcess
from slipstream.launcher.programs import Program, api_url, programs_of, reachable
from slipstream.launcher.readiness import NO_ANSWER, Readiness
from slipstream.launcher.stack import API, Stack, read_stack
from slipstream.listen import read_token

_LOOK_SECONDS = 0.5
"""Between two looks at stack.json."""
_ASK_SECONDS = 0.3
"""Between two questions whether a process is ready."""
_CHECK_SECONDS = 5.0
"""Between two questions whether the control API still answers."""
_HUNG_CHECKS = 8
"""So many without an answer (3 s each) mean that it hangs."""

Say = Callable[[str], None]


class StopRequest:
    """SIGINT, SIGTERM and SIGHUP, counted while the block is open; each wakes the loop. Main thread only."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def heard(self) -> Iterator[int]:
        """Gives the descriptor that becomes readable with every signal."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        wake_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        before = {number: signal.signal(number, self._count) for number in numbers}
        try:
            yield reader
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wake_before)
            os.close(reader)
            os.close(writer)

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


class Supervisor:
    """Runs in the main thread of a process that holds the home's supervisor.lock."""

    def __init__(
        self,
        home: Path,
        *,
        say: Say,
        on_state: Callable[[SupervisorState], None] = lambda _state: None,
        policy: RestartPolicy | None = None,
        alive_with: int | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            home: with a stack.json.
            say: takes sentences about what happens.
            on_state: called with every change of what supervisor.json says.
            policy: of restarts.
            alive_with: a descriptor; once its other end is closed, the stack is stopped.
        """
        self._home = Home(home)
        self._say = say
        self._on_state = on_state
        self._policy = policy or RestartPolicy()
        self._alive_with = alive_with
        self._stop = StopRequest()
        self._processes: dict[str, SupervisedProcess] = {}
        self._stack_seen: tuple[int, int] | None = None
        self._stack: Stack | None = None
        self._programs: dict[str, Program] = {}
        self._readiness: Readiness | None = None
        self._ask_at = 0.0
        self._check_at = 0.0
        self._unanswered = 0
        self._published: SupervisorState | None = None
        self._written: SupervisorState | None = None
        self._api_was_ready = False

    def run(self) -> bool:
        """Bring the stack up, keep it up until a signal, stop it in order; False when nothing useful could run.

        Raises:
            SlipstreamError: stack.json cannot be used.
        """
        useful = True
        with self._stop.heard() as wake:
            try:
                while not self._must_stop() and useful:
                    self._look_at_stack()
                    self._step()
                    self._ask()
                    self._check_api()
                    self._publish()
                    useful = self._is_useful()
                    self._wait(wake)
            finally:
                self._end()
        return useful

    def _must_stop(self) -> bool:
        return self._stop.count > 0

    def _look_at_stack(self) -> None:
        """Take over what stack.json wants, if it has changed."""
        if not self._has_changed():
            return
        try:
            stack = read_stack(self._home.root)
        except SlipstreamError as error:
            if self._stack is None:
                raise
            self._say(f"{error} The stack stays as it is.")
            return
        if stack is None:
            return
        first_look, self._stack = self._stack is None, stack
        self._programs = programs_of(stack, self._home)
        if first_look:
            self._open_readiness(stack)
            self._take_up()
        for process in self._processes.values():
            process.try_again()

    def _has_changed(self) -> bool:
        try:
            status = self._home.stack_file.stat()
        except OSError:
            return self._stack is None
        seen = (status.st_mtime_ns, status.st_ino)
        changed, self._stack_seen = seen != self._stack_seen, seen
        return changed

    def _open_readiness(self, stack: Stack) -> None:
        token = read_token(Path(stack.token_file) if stack.token_file else None)
        self._readiness = Readiness(api_url(stack), token, stack.target.name if stack.target else None)

    def _take_up(self) -> None:
        """Find what a supervisor that was killed left running: keep what fits, end what does not."""
        leftovers = []
        for found in found_alive(self._home, self._say):
            program = self._programs.get(found.name)
            process = program and SupervisedProcess(program, self._policy, say=self._say)
            if process and process.adopt():
                self._processes[found.name] = process
            else:
                self._say(f"{found.name}: still alive with other settings")
                leftovers.append(found)
        end_in_order(leftovers, say=self._say, hurry=self._in_a_hurry)

    def _step(self) -> None:
        """Start what is wanted, end what is not, notice what has ended."""
        for name, process in list(self._processes.items()):
            if name not in self._programs:
                process.retire(TRAINER_GRACE_SECONDS)
            process.step()
            if process.state == "STOPPING" and not process.is_alive:
                del self._processes[name]
        for name, program in self._programs.items():
            if name not in self._processes:
                self._processes[name] = SupervisedProcess(program, self._policy, say=self._say)
                self._processes[name].step()

    def _in_a_hurry(self) -> bool:
        return self._stop.count > 1

    def _ask(self) -> None:
        """Ask who is ready among those that start; the others only once the API is."""
        waiting = [process for process in self._processes.values() if process.state == "STARTING"]
        if not waiting or time.monotonic() < self._ask_at:
            return
        assert self._readiness is not None
        for process in waiting:
            if process.name != API and self._processes[API].state != "READY":
                process.note_unready("waits for the control API")
                continue
            problem = self._readiness.problem_of(process)
            if problem is None:
                process.note_ready()
                self._say(f"{process.name}: ready")
            else:
                process.note_unready(problem)
            if self._must_stop():
                break
        self._ask_at = time.monotonic() + _ASK_SECONDS

    def _check_api(self) -> None:
        """Kill a control API that has not answered for a minute: it is started again, and its database is whole."""
        api = self._processes[API]
        if api.state != "READY":
            self._unanswered = 0
        elif self._readiness is not None and time.monotonic() >= self._check_at:
            problem = self._readiness.problem_of(api)
            # Counted, not timed: where this process stood still as well, that says nothing.
            self._unanswered = 0 if problem != NO_ANSWER else self._unanswered + 1
            if self._unanswered >= _HUNG_CHECKS:
                self._say(f"{API}: killed, it has not answered {_HUNG_CHECKS} times in a row")
                api.signal(signal.SIGKILL)
            self._check_at = time.monotonic() + _CHECK_SECONDS

    def _is_useful(self) -> bool:
        """Whether anything can be done with what still runs: an API that never came up leaves no way to say what."""
        api = self._processes[API]
        self._api_was_ready |= api.state == "READY"
        all_gone = all(process.state == "GAVE_UP" for process in self._processes.values())
        return not all_gone and not (api.state == "GAVE_UP" and not self._api_was_ready)

    def _wait(self, wake: int) -> None:
        moments = [process.wakes_at for process in self._processes.values() if process.wakes_at is not None]
        if any(process.state == "STARTING" for process in self._processes.values()):
            moments.append(self._ask_at)
        now = time.monotonic()
        seconds = min([_LOOK_SECONDS, *(moment - now for moment in moments)])
        descriptors = [process.descriptor for process in self._processes.values() if process.descriptor is not None]
        if self._alive_with is not None:
            descriptors.append(self._alive_with)
        wait_for_any([wake, *descriptors], seconds)
        if self._alive_with is not None and wait_for_any([self._alive_with], 0.0):
            self._say("the program that this stack was started for has ended")
            self._stop.count += 1

    def _publish(self, stopping: bool = False) -> None:
        stack = self._stack
        if stack is None:
            return
        state = SupervisorState(
            pid=os.getpid(),
            state="STOPPING" if stopping else self._state(),
            api=api_url(stack),
            dashboard=f"{api_url(stack)}/dashboard/",
            token_file=stack.token_file,
            target=reachable(stack.target.address) if stack.target else None,
            processes=tuple(process.status for process in self._processes.values()),
        )
        is_news, self._published = state != self._published, state
        if state != self._written:
            self._write(state, is_news)
        if is_news:
            self._on_state(state)

    def _write(self, state: SupervisorState, is_news: bool) -> None:
        try:
            write_text(self._home.supervisor_file, state.model_dump_json(indent=2) + "\n")
        except SlipstreamError as error:
            if self._written is None:
                raise
            # A full disk ends no training: the file is written when there is room again.
            if is_news:
                self._say(f"{error}")
        else:
            self._written = state

    def _state(self) -> StackState:
        states = {process.state for process in self._processes.values()} - {"STOPPING"}
        if "GAVE_UP" in states:
            return "DEGRADED"
        return "READY" if states == {"READY"} else "STARTING"

    def _end(self) -> None:
        with suppress(SlipstreamError):  # a full disk keeps nobody running
            self._publish(stopping=True)
        end_in_order(list(self._processes.values()), say=self._say, hurry=self._in_a_hurry)
        end_strays(self._home, say=self._say, hurry=self._in_a_hurry)
        if self._readiness is not None:
            self._readiness.close()
        with suppress(OSError):  # who reads it also looks whether the lock is held
            self._home.supervisor_file.unlink(missing_ok=True)
