"""Both ends of a benchmark worker: commands down, answers up, both JSON lines; the parent gives each a deadline."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from slipstream.child_processes import end_process

REASON_LENGTH = 400


class WorkerFailedError(Exception):
    """The worker said why it cannot go on, ended, or did not answer in time."""


class WorkerProcess:
    """`python -m MODULE ...` in a process of its own. Use as a context manager: it ends with the block."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        """Start it; `arguments`: module and its options; `log`: takes its stderr."""
        self._log = log.open("wb")
        self.started_at = time.time()
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, timeout: float, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            WorkerFailedError: it failed, ended, or was silent for `timeout` seconds.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # What it said before it ended is the reason.
            pass
        return self.answer(timeout)

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            WorkerFailedError: see `ask`.
        """
        try:
            line = self._answers.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            self.close()
            raise WorkerFailedError(f"no answer within {timeout:.0f} s, see {self._log.name}") from None
        if line is None:
            raise WorkerFailedError(f"ended with {self._process.wait()}, see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise WorkerFailedError(answer["failed"])
        return answer

    def close(self) -> None:
        """End it."""
        end_process(self._process)
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)


def commands() -> Iterator[dict[str, Any]]:
    """In the worker: what the parent asks for, until it closes the pipe."""
    return (json.loads(line) for line in sys.stdin)


def answer_all(
    begin: Callable[[], dict[str, Any]],
    obey: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    in_own_words: type[Exception] | tuple[type[Exception], ...] = (),
) -> int:
    """In a worker whose libraries print: answer once unasked, then every command; a failure is the last answer.

    Args:
        begin: gives the first answer.
        obey: from a command to its answer.
        in_own_words: exceptions whose text says it all.

    Returns:
        The exit status.
    """
    # Answers go to the stdout that the process started with, whatever else is printed to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        reply(begin(), answers)
        for command in commands():
            reply(obey(command), answers)
    except Exception as error:  # noqa: BLE001 - the process's boundary: the reason is the answer
        traceback.print_exc()
        text = str(error) if isinstance(error, in_own_words) else f"{type(error).__name__}: {error}"
        reply({"failed": " ".join(text.split())[:REASON_LENGTH]}, answers)
        return 1
    return 0


def reply(answer: dict[str, Any], output: TextIO | None = None) -> None:
    """In the worker: one answer; `output`: default: stdout."""
    output = output or sys.stdout
    output.write(json.dumps(answer) + "\n")
    output.flush()
