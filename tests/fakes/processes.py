"""Real processes for system tests: started with a deadline, watched by their own output, never polled."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_LEAVE_SECONDS = 5.0
_READ_SECONDS = 30.0

ADDRESS = re.compile(r"(127\.0\.0\.1:\d+)")


def import_path(*first: Path) -> str:
    """PYTHONPATH of a child: `first`, then wherever this process imports from: sources, installed wheel, packages that
    only its own PYTHONPATH named."""
    return os.pathsep.join([*map(str, first), *filter(None, sys.path)])


class ManagedProcess:
    """A child process whose stdout and stderr are collected line by line; ended when the test leaves it.

    Every wait has a deadline and fails with the whole output, so that a hanging test explains itself.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(env or {})
        self.argv = list(argv)
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._process = subprocess.Popen(
            self.argv,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._collect, name=f"output-{self.pid}", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def output(self) -> str:
        """Everything printed so far."""
        with self._changed:
            return "\n".join(self.lines)

    def wait_for_line(self, pattern: str | re.Pattern[str], *, timeout: float = 60.0, start: int = 0) -> re.Match[str]:
        """The first match of `pattern` in a line printed so far or within `timeout` seconds.

        `start` skips that many lines, to wait for something that happened before already.

        Raises:
            AssertionError: the process ended, or the time was up; the message holds the output.
        """
        expression = re.compile(pattern)
        seen = start
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for line in self.lines[seen:]:
                    if match := expression.search(line):
                        return match
                seen = len(self.lines)
                remaining = deadline - time.monotonic()
                if self._ended or remaining <= 0:
                    break
                self._changed.wait(remaining)
        why = "the process ended" if self._ended else f"{timeout:.0f} s went by"
        raise AssertionError(f"{why} without a line like {expression.pattern!r}; {self._story()}")

    def wait_exit(self, *, timeout: float = 60.0) -> int:
        """Exit status (negative: the signal that killed it), once everything it printed has been collected.

        Raises:
            AssertionError: it still runs after `timeout` seconds.
        """
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:.0f} s; {self._story()}") from None
        self._pump.join(_READ_SECONDS)
        return status

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken the process away."""
        self._process.kill()
        self._process.wait()

    def _collect(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _story(self) -> str:
        return f"command: {' '.join(self.argv)}\noutput:\n{self.output}"

    def __enter__(self) -> "ManagedProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            # A killed target server would leave its shared memory behind until the next one starts.
            self.terminate()
            try:
                self._process.wait(_LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self._pump.join(5.0)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Processes:
    """Starts processes and ends whatever is left at the end of a test. Use it through a fixture."""

    def __init__(self) -> None:
        self._started: list[ManagedProcess] = []

    def start(self, module: str, *arguments: str | Path, env: Mapping[str, str] | None = None) -> ManagedProcess:
        """`python -m module arguments…` with this test's interpreter and what this test can import."""
        # -P: the working directory is no place to import from; a wheel under test must not be hidden by the sources.
        argv = [sys.executable, "-P", "-m", module, *map(str, arguments)]
        process = ManagedProcess(argv, env={"PYTHONPATH": import_path()} | dict(env or {}))
        self._started.append(process)
        return process

    def start_target_server(
        self, *arguments: str | Path, port: int = 0, timeout: float = 120.0, env: Mapping[str, str] | None = None
    ) -> tuple[ManagedProcess, str]:
        """A target server on 127.0.0.1, and its address once it serves. `port` names one to come back to."""
        listen = f"127.0.0.1:{port}"
        process = self.start("target_server", "serve", *arguments, "--listen", listen, env=env)
        return process, process.wait_for_line(ADDRESS, timeout=timeout).group(1)

    def close(self) -> None:
        """End what still runs, youngest first."""
        for process in reversed(self._started):
            process.__exit__(None, None, None)
        self._started.clear()
