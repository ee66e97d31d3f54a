"""One compile cache for the trainers of a user or a volume: where it lies, and whose turn it is to fill it.

`SLIPSTREAM_COMPILE_CACHE` names the directory (default: `~/.cache/slipstream/compiled`), or is `off`: torch then keeps
its files where it likes. In it every combination of torch, triton and GPU has a folder, so that machines that share a
volume do not mix. Whoever sets TORCHINDUCTOR_CACHE_DIR has decided already, and is left alone.

Trainers that would compile the same thing take turns: the first one compiles while the others wait, which then load
what it has left. The turn is a file lock, which the kernel takes back from a process that dies. Torch-free.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from slipstream.wire.channel import WaitInterruptedError

SETTING = "SLIPSTREAM_COMPILE_CACHE"
OFF = "off"
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
SMALLEST_FREE_BYTES = 512 << 20
"""What the kernels of a run take is a tenth of it."""

_LOOK_AGAIN_SECONDS = 0.5

_log = logging.getLogger(__name__)


def use_compile_cache(environment: MutableMapping[str, str], *, built_for: tuple[str, ...]) -> Path | None:
    """Point torch and triton to the shared cache. Call it before anything is compiled.

    Args:
        environment: of this process; TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR are set there.
        built_for: versions and device that compiled code depends on.

    Returns:
        The folder with the cache; None where torch keeps to its own.

    Raises:
        SlipstreamError: the directory that SLIPSTREAM_COMPILE_CACHE names cannot be written (PATH_NOT_ALLOWED) or has
            no room (DISK_FULL). Without the setting that is a warning, and torch keeps to its own directory.
    """
    if environment.get(INDUCTOR):
        log_event(_log, "info", "compile_cache", directory=environment[INDUCTOR], because=f"{INDUCTOR} is set")
        return Path(environment[INDUCTOR])
    setting = environment.get(SETTING, "")
    if setting == OFF:
        log_event(_log, "info", "compile_cache", directory="torch's own", because=f"{SETTING} is {OFF}")
        return None
    root = Path(setting).expanduser() if setting else default_directory(environment)
    folder = root / folder_name(built_for)
    refusal = why_unusable(folder)
    if refusal is not None:
        if setting:
            raise refusal
        log_event(
            _log,
            "warning",
            "compile_cache_unusable",
            detail=refusal.message,
            instead="torch's own directory",
            remedy=refusal.remedy,
        )
        return None
    environment[INDUCTOR] = str(folder / "inductor")
    environment.setdefault(TRITON, str(folder / "triton"))
    log_event(_log, "info", "compile_cache", directory=str(folder))
    return folder / "inductor"


def default_directory(environment: Mapping[str, str]) -> Path:
    """Of this user."""
    if base := environment.get("XDG_CACHE_HOME"):
        return Path(base) / "slipstream" / "compiled"
    try:
        return Path.home() / ".cache" / "slipstream" / "compiled"
    except RuntimeError:
        # A container's user that no file knows.
        return Path(tempfile.gettempdir()) / f"slipstream-compiled-{os.getuid()}"


def folder_name(built_for: tuple[str, ...]) -> str:
    """Readable, and without what a file system might not like."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", "_".join(built_for))


def why_unusable(folder: Path) -> SlipstreamError | None:
    """Make the folder and write a file there; what to say where that fails or room is short."""
    elsewhere = f"Name another directory with {SETTING}, or set {SETTING}={OFF}: torch then uses its own."
    try:
        for part in ("inductor", "triton"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < SMALLEST_FREE_BYTES:
            return SlipstreamError(
                f"The compile cache {folder} has {free >> 20} MiB of room, it needs {SMALLEST_FREE_BYTES >> 20} MiB.",
                reason=Reason.DISK_FULL,
                remedy=f"Free some space. {elsewhere}",
            )
        with tempfile.TemporaryFile(dir=folder / "inductor") as probe:
            probe.write(bytes(1 << 16))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return SlipstreamError(
            f"The compile cache {folder} cannot be written: {error.strerror or error}.",
            reason=Reason.PATH_NOT_ALLOWED,
            remedy=elsewhere,
        )
    return None


@contextmanager
def compiling_turn(folder: Path | None, what: str, stop: threading.Event) -> Iterator[None]:
    """Hold the turn to compile `what` for the length of the block, unless that lies in the cache already.

    A block that ends well leaves a mark that it does.

    Args:
        folder: what `use_compile_cache` returned; None: nothing is shared and nobody waits.
        what: all that the compiled code depends on besides versions and device.
        stop: ends the waiting.

    Raises:
        WaitInterruptedError: told to stop while another process has the turn.
    """
    if folder is None:
        yield
        return
    name = hashlib.blake2b(what.encode(), digest_size=12).hexdigest()
    done = folder / f"compiled-{name}.json"
    if done.exists():
        yield
        return
    file = _open_lock(folder / f"compiling-{name}.lock")
    if file is None:
        yield
        return
    with file:
        _wait_for_turn(file, stop)
        if done.exists():
            # Somebody else has compiled meanwhile; loading needs no turn.
            fcntl.flock(file, fcntl.LOCK_UN)
            yield
            return
        file.truncate(0)
        json.dump(_this_process(), file)
        file.flush()
        yield
        try:
            done.write_text(json.dumps(_this_process()), encoding="utf-8")
        except OSError as error:
            # All is compiled and this process goes on; the next one takes a turn again, and finds it in the cache.
            log_event(_log, "warning", "compile_cache_not_marked", file=str(done), detail=error.strerror)


def _open_lock(path: Path) -> IO[str] | None:
    """None, and a warning, where this user may not write it or the file system has no locks: trainers then compile side
    by side, which costs time and nothing else."""
    file = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
        if _lock(file):
            fcntl.flock(file, fcntl.LOCK_UN)
    except OSError as error:
        if file is not None:
            file.close()
        log_event(_log, "warning", "compile_cache_without_turns", lock=str(path), detail=error.strerror)
        return None
    return file


def _wait_for_turn(file: IO[str], stop: threading.Event) -> None:
    said: str | None = None
    while not _lock(file):
        holder = _holder(file)
        if holder != said:
            log_event(_log, "info", "waiting_for_compile_cache", held_by=holder, lock=file.name)
            said = holder
        if stop.wait(_LOOK_AGAIN_SECONDS):
            raise WaitInterruptedError(f"the compile cache, which is being filled by {holder}")


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: IO[str]) -> str:
    """Who has the lock, in words."""
    file.seek(0)
    try:
        told = json.loads(file.read())
        return f"process {told['pid']} on {told['host']}, since {told['since']}"
    except (ValueError, KeyError, TypeError):
        return "a process that has not said who it is"


def _this_process() -> dict[str, object]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
