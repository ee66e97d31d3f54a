"""The stack that is wanted, as data: stack.json of a home. Who changes the file changes the stack.

    add_trainer(home, device="cuda:1") -> "gpu1"     one more trainer agent in a stack that is up
    remove_trainer(home, "gpu1")                     one less: its run is saved first

The supervisor notices within a second.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slipstream.errors import SlipstreamError
from slipstream.launcher.home import Home, is_up, locked, read_text, write_text
from slipstream.run_spec.names import is_name
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec

API = "control-api"
TARGET = "target"
"""Names of the two other processes of a stack; no trainer may have them."""

DEVICE = re.compile(r"cpu|cuda(:\d+)?")

Threads = Annotated[int, Field(ge=1)] | None
"""CPU threads of torch; None: torch's own choice."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServicePart(_Part):
    """A process that others connect to."""

    listen: str
    """HOST:PORT as asked for; the port may be 0."""
    address: str
    """The same with the port in use, kept over restarts: others must find it again."""


class ApiPart(ServicePart):
    """The control API."""


class TargetPart(ServicePart):
    """The target server."""

    name: str
    """Under which the control API knows it."""
    model: TargetSpec
    device: str
    """One, or several with commas between them: an engine process on each, or on each group of them."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Devices that share the layers of an engine."""
    threads: Threads = None


class TrainerPart(_Part):
    """A trainer agent."""

    name: str
    device: str
    threads: Threads = None


class Stack(_Part):
    """Everything that a supervisor keeps alive, and with which settings."""

    version: Literal[1] = 1
    api: ApiPart
    target: TargetPart | None
    trainers: tuple[TrainerPart, ...]
    data_roots: tuple[str, ...]
    """Where runs may name files; relative names start at the first."""
    confined: bool = False
    """Whether that holds on loopback too, where any file of this machine may be named otherwise."""
    token_file: str | None = None
    example: tuple[str, ...] = ()
    """Arguments of `slipstream run create` for a run that fits the target."""

    @model_validator(mode="after")
    def _names_are_usable(self) -> Self:
        names = [trainer.name for trainer in self.trainers]
        for name in names:
            if name in (API, TARGET) or not is_name(name):
                raise ValueError(f"{name!r} cannot be the name of a trainer")
        if len(set(names)) < len(names):
            raise ValueError("two trainers have the same name")
        return self


def read_stack(home: Path) -> Stack | None:
    """The stack of a home; None where none was ever brought up.

    Raises:
        SlipstreamError: SPEC_INVALID, stack.json is damaged or of another version.
    """
    path = Home(home).stack_file
    text = read_text(path)
    if text is None:
        return None
    try:
        return Stack.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SlipstreamError(
            f"{path} is no stack: {'.'.join(map(str, first['loc'])) or 'the text'}: {first['msg']}",
            reason=Reason.SPEC_INVALID,
            remedy="Remove it, then bring the stack up again: `slipstream up RECIPE`. Its runs are not in this file.",
        ) from error


def write_stack(home: Path, stack: Stack) -> None:
    """Replace stack.json.

    Raises:
        SlipstreamError: PATH_NOT_ALLOWED, or DISK_FULL.
    """
    write_text(Home(home).stack_file, stack.model_dump_json(indent=2) + "\n")


def add_trainer(home: Path, device: str, *, name: str | None = None, threads: int | None = None) -> str:
    """One more trainer agent in a stack that is up; returns its name.

    Args:
        home: of the stack.
        device: `cpu`, `cuda` or `cuda:N`.
        name: default: after the device, such as `gpu1` or `cpu-2`.
        threads: CPU threads of torch; default: as another trainer of the stack on that device, else torch's choice.

    Raises:
        SlipstreamError: NOT_READY, no stack is up; SPEC_INVALID, the device or the name is no such; NAME_TAKEN.
    """
    require_device(device)
    with _changing(home) as stack:
        taken = [trainer.name for trainer in stack.trainers]
        chosen = name or free_name(device, taken)
        if chosen in (*taken, API, TARGET):
            raise SlipstreamError(
                f"this stack has a process {chosen!r} already",
                reason=Reason.NAME_TAKEN,
                remedy="Give another name, or none.",
            )
        if threads is None:
            threads = next((one.threads for one in stack.trainers if one.device == device), None)
        trainer = TrainerPart(name=chosen, device=device, threads=threads)
        _replace(home, stack, (*stack.trainers, trainer))
    return chosen


def remove_trainer(home: Path, name: str) -> None:
    """End a trainer agent of a stack that is up, for good; what it trains is saved first.

    Raises:
        SlipstreamError: NOT_READY, no stack is up; TRAINER_UNKNOWN.
    """
    with _changing(home) as stack:
        rest = tuple(trainer for trainer in stack.trainers if trainer.name != name)
        if len(rest) == len(stack.trainers):
            names = ", ".join(trainer.name for trainer in rest) or "none"
            raise SlipstreamError(
                f"this stack has no trainer {name!r}",
                reason=Reason.TRAINER_UNKNOWN,
                remedy=f"Its trainers: {names}. One that was started by hand leaves with Ctrl-C or SIGTERM.",
            )
        _replace(home, stack, rest)


@contextmanager
def _changing(home: Path) -> Iterator[Stack]:
    """The stack of a home that is up, while nobody else changes it."""
    if not is_up(home):
        raise SlipstreamError(
            f"no stack is up in {home}", reason=Reason.NOT_READY, remedy="Bring it up with `slipstream up`."
        )
    with locked(Home(home).stack_lock):
        stack = read_stack(home)
        assert stack is not None, "a supervisor runs"
        yield stack


def _replace(home: Path, stack: Stack, trainers: tuple[TrainerPart, ...]) -> None:
    try:
        # Through validation: model_copy would take any name.
        changed = Stack.model_validate({**dict(stack), "trainers": trainers})
    except ValidationError as error:
        raise SlipstreamError(error.errors()[0]["msg"], reason=Reason.SPEC_INVALID) from error
    write_stack(home, changed)


def free_name(device: str, taken: list[str]) -> str:
    """A trainer's name after its device: gpu5, cpu, and cpu-2 for the second one there."""
    stem = f"gpu{device.partition(':')[2]}" if device.startswith("cuda") else device
    names = [stem, *(f"{stem}-{number}" for number in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)


def require_device(device: str) -> None:
    """Refuse what is no device.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    if not DEVICE.fullmatch(device):
        raise SlipstreamError(
            f"{device!r} is no device", reason=Reason.SPEC_INVALID, remedy="Devices are cpu, cuda and cuda:N."
        )
