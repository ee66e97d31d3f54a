"""The home of a local stack: a directory that holds what is wanted, what is, and everything that must outlive a kill.

stack.json        what `slipstream up` was asked for          control-api.sqlite   runs, metrics, events
supervisor.json   what runs, and where                        target/              the target server's ledger
supervisor.lock   held by the supervisor while it lives       trainers/NAME/       state of a trainer agent
locks/NAME.lock   held by a process while it lives            runs/                checkpoints and metrics
                                                              exports/             checkpoints as engines read them
                                                              logs/NAME.log        output of a process
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from slipstream.disk import disk_errors_in_words, write_atomically
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

ProcessState = Literal["STARTING", "READY", "WAITING", "GAVE_UP", "STOPPING"]
"""WAITING: it will be started, again if it died. STOPPING: it is no longer wanted."""
StackState = Literal["STARTING", "READY", "DEGRADED", "STOPPING"]
"""DEGRADED: a process gave up; the others run."""


class ProcessStatus(BaseModel):
    """One process, as the supervisor sees it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    pid: int | None
    state: ProcessState
    restarts: int = 0
    problem: str = ""
    """Why it is not READY, with the end of its log once it gave up."""
    log: str


class SupervisorState(BaseModel):
    """supervisor.json."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pid: int
    state: StackState
    api: str
    """`http://HOST:PORT`, as this machine reaches it."""
    dashboard: str
    token_file: str | None
    """Holds the bearer token of all services; None: they ask for none."""
    target: str | None
    """Address of the target server; None: the stack has none."""
    processes: tuple[ProcessStatus, ...]


class Home:
    """Paths of a home."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.stack_file = self.root / "stack.json"
        self.stack_lock = self.root / "stack.lock"
        self.supervisor_file = self.root / "supervisor.json"
        self.supervisor_lock = self.root / "supervisor.lock"
        self.database = self.root / "control-api.sqlite"
        self.ledger = self.root / "target" / "ledger.sqlite"
        self.trainers = self.root / "trainers"
        self.runs = self.root / "runs"
        self.exports = self.root / "exports"
        self.logs = self.root / "logs"
        self.locks = self.root / "locks"
        self.token_file = self.root / "token"

    def make(self) -> None:
        """Make the directories.

        Raises:
            SlipstreamError: PATH_NOT_ALLOWED, or DISK_FULL.
        """
        with writing(self.root):
            for directory in (self.trainers, self.runs, self.logs, self.locks, self.ledger.parent):
                directory.mkdir(parents=True, exist_ok=True)

    def log_file(self, name: str) -> Path:
        """Where a process writes."""
        return self.logs / f"{name}.log"


def home_directory(flag: Path | None = None) -> Path:
    """The home that a command line means: --home, else $SLIPSTREAM_HOME, else ~/.slipstream."""
    chosen = flag or os.environ.get("SLIPSTREAM_HOME") or "~/.slipstream"
    return Path(chosen).expanduser().absolute()


def run_directories(name: str, home: Path | None = None) -> list[Path]:
    """Where a run of this name may lie on this machine: below runs/ where we are, and in the local stack.

    Nowhere, if it is no name. `home`: --home of a command line.
    """
    if name in ("", ".", "..") or "/" in name:
        return []
    return [Path("runs") / name, Home(home_directory(home)).runs / name]


def read_supervisor(home: Path) -> SupervisorState | None:
    """What the supervisor of a home wrote last; None where no stack is up.

    After a kill of the supervisor the file is still there, and what it names may run or not.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED, the file is not readable.
    """
    text = read_text(Home(home).supervisor_file)
    if text is None:
        return None
    try:
        return SupervisorState.model_validate_json(text)
    except ValidationError as error:
        raise SlipstreamError(
            f"{Home(home).supervisor_file} is damaged: {error.errors()[0]['msg']}",
            reason=Reason.ENVIRONMENT_UNSUPPORTED,
            remedy="Delete it; `slipstream up` writes it again.",
        ) from error


def read_text(path: Path) -> str | None:
    """A file's text; None where there is no such file.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SlipstreamError(
            f"cannot read {path}: {error}", reason=Reason.ENVIRONMENT_UNSUPPORTED, remedy="Give another --home."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, sees the old text or the new one.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, or DISK_FULL.
    """
    with writing(path):
        write_atomically(path, text)


def writing(path: Path) -> AbstractContextManager[None]:
    """Turn what the file system refuses while `path`, of a home, is written into words.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, or DISK_FULL.
    """
    return disk_errors_in_words(path, flag="--home")


def try_lock(path: Path, *, patience: float = 0.0) -> IO[bytes] | None:
    """Take a lock; None when another process holds it for longer than `patience` seconds.

    It lasts until the file is closed, in this process and in all that inherited it.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, the file cannot be made.
    """
    with writing(path):
        file = path.open("ab")
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                return None
            time.sleep(0.02)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock, waiting for it: for what is over in a moment."""
    with writing(path):
        file = path.open("ab")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def take_over(home: Path) -> IO[bytes] | None:
    """The supervisor's lock; None when a supervisor runs for this home.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED.
    """
    with writing(home):
        home.mkdir(parents=True, exist_ok=True)
    # Who only looks (`is_up`) holds it for a moment.
    return try_lock(Home(home).supervisor_lock, patience=0.5)


def is_up(home: Path) -> bool:
    """Whether a supervisor runs for this home."""
    return is_held(Home(home).supervisor_lock)


def is_held(lock: Path) -> bool:
    """Whether a process has this lock."""
    if not lock.exists():
        return False
    taken = try_lock(lock)
    if taken is not None:
        taken.close()
    return taken is None
