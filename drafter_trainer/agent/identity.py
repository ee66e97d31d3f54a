"""Who an agent is: its name, the instance that its state directory holds, the storage that its runs lie on."""

import fcntl
import os
import platform
import re
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from drafter_trainer.agent.devices import TrainerDevice
from slipstream import __version__
from slipstream.disk import disk_errors_in_words, write_atomically
from slipstream.errors import SlipstreamError
from slipstream.machine_probe import package_version
from slipstream.run_spec.names import NAME_RULE, is_name
from slipstream.run_spec.reasons import Reason

PROTOCOL_VERSION = 1
"""Agent and control API refuse each other when theirs differ."""
_ID = re.compile(r"[0-9a-zA-Z._-]{1,255}")
_STORAGE_FILE = ".storage-id"


@dataclass(frozen=True)
class Identity:
    """Who the agent is, to the control API."""

    name: str
    instance_id: str
    storage: str

    def registration(self, device: TrainerDevice) -> dict[str, Any]:
        """Body of a registration."""
        return {
            "name": self.name,
            "instance_id": self.instance_id,
            "protocol_version": PROTOCOL_VERSION,
            "host": socket.gethostname()[:255] or "unknown",
            "storage": self.storage,
            "devices": [device.as_json()],
            "versions": {
                "slipstream": __version__,
                "torch": package_version("torch") or "none",
                "python": platform.python_version(),
            },
        }


@dataclass(frozen=True)
class AgentState:
    """The state directory, held by a lock until the process ends: one agent at a time."""

    directory: Path
    instance_id: str
    """The same for every agent that is started with this directory."""
    lock: BinaryIO


def open_state(directory: Path) -> AgentState:
    """Make the directory if it is missing, and take it.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, another agent has it, or it cannot be written.
    """
    with disk_errors_in_words(directory, flag="--state"):
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "agent.lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise SlipstreamError(
                f"Another agent has the state directory {directory}.",
                reason=Reason.PATH_NOT_ALLOWED,
                remedy="Give every agent a --name, or a --state directory, of its own.",
            ) from None
        return AgentState(directory, _written_once(directory / "instance-id"), lock)


def storage_id(runs: Path) -> str:
    """Identity of the directory of runs: agents that share the directory share it.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, DISK_FULL.
    """
    with disk_errors_in_words(runs, flag="--runs"):
        runs.mkdir(parents=True, exist_ok=True)
        return _written_once(runs / _STORAGE_FILE)


def check_name(name: str) -> str:
    """The name, if the control API takes it.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    if not is_name(name):
        raise SlipstreamError(f"--name is {name!r}.", reason=Reason.SPEC_INVALID, remedy=NAME_RULE)
    return name


def default_name(device: str) -> str:
    """The host's name, and the number of a GPU that was asked for: `box1`, `box1-cuda5`."""
    host = re.sub(r"[^a-z0-9._-]", "-", socket.gethostname().lower())
    suffix = "-" + device.replace(":", "") if ":" in device else ""
    return (host[: 63 - len(suffix)] + suffix).strip("._-") or "trainer"


def _written_once(path: Path) -> str:
    """The content of a file that whoever comes first fills with a random name, whole or not at all."""
    with suppress(FileNotFoundError):
        return _read_id(path)
    own = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    write_atomically(own, uuid.uuid4().hex + "\n")
    try:
        with suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink()
    return _read_id(path)


def _read_id(path: Path) -> str:
    content = path.read_text(encoding="utf-8", errors="replace").strip()
    if not _ID.fullmatch(content):
        raise SlipstreamError(
            f"{path} is damaged.",
            reason=Reason.PATH_NOT_ALLOWED,
            remedy="It holds a random name, written once. Delete it to get a new one: runs that have checkpoints here "
            "are then known only by their old control API.",
        )
    return content
