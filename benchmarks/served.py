"""A real target server for a benchmark: started, loaded, and ended with the block that asked for it."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.worker_process import WorkerFailedError
from slipstream.child_processes import child_process
from slipstream.wire.channel import TargetClient

START_SECONDS = 240.0
"""To load and to compile; a machine that has compiled nothing yet takes the longest."""


@dataclass(frozen=True)
class Served:
    """A server that has loaded its target."""

    address: str
    process: subprocess.Popen[bytes]


@contextmanager
def target_server(
    arguments: Sequence[str], work: Path, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """`target-server serve` with these arguments, on a port of its own.

    Args:
        arguments: recipe or model, and flags.
        work: directory for its port file and its ledger, which must be new for every server.
        log: takes what it says.
        environment: what it sees besides this process's environment.

    Raises:
        WorkerFailedError: it ended, or did not load in time.
    """
    port = work / "port"
    command = [sys.executable, "-m", "target_server", "serve", *arguments, "--listen", "127.0.0.1:0"]
    command += ["--port-file", str(port), "--ledger", str(work / "ledger.sqlite")]
    deadline = time.monotonic() + START_SECONDS
    with log.open("wb") as file, child_process(command, environment=environment, output=file) as process:

        def check(_reason: object = None, _seconds: float = 0.0) -> None:
            if time.monotonic() > deadline or process.poll() is not None:
                raise WorkerFailedError(f"the target server did not start: see {log.name}")

        while not port.exists():
            check()
            time.sleep(0.1)
        address = port.read_text(encoding="utf-8").strip()
        with TargetClient(address, on_wait=check) as client:
            client.get_target()
        yield Served(address, process)
