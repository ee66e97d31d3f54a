"""The command line of every process of a stack."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import __version__
from slipstream.child_processes import visible_gpu
from slipstream.launcher.home import Home
from slipstream.launcher.stack import API, TARGET, Stack, TargetPart, TrainerPart
from slipstream.listen import ListenAddress


@dataclass(frozen=True)
class Program:
    """One process of a stack: what is run, and the files that belong to it."""

    name: str
    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    """Beside what the supervisor's own environment has."""
    directory: Path
    log: Path
    lock: Path

    @property
    def fingerprint(self) -> str:
        """Equal for programs that need not be started anew in place of each other."""
        return json.dumps([__version__, self.argv, self.environment])


def programs_of(stack: Stack, home: Home) -> dict[str, Program]:
    """Name → program, in the order of starting."""
    programs = [_api(stack, home)]
    if stack.target is not None:
        programs.append(_target(stack, stack.target, home))
    programs += [_trainer(stack, trainer, home) for trainer in stack.trainers]
    return {program.name: program for program in programs}


def api_url(stack: Stack) -> str:
    """As processes of this machine reach the control API."""
    return f"http://{reachable(stack.api.address)}"


def reachable(address: str) -> str:
    """Where this machine reaches what listens at an address: one that means all interfaces is none to connect to."""
    listen = ListenAddress.parse(address)
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen.host, listen.host)
    return str(ListenAddress(loopback, listen.port))


def _api(stack: Stack, home: Home) -> Program:
    arguments = ["--listen", stack.api.address, "--database", f"sqlite:///{home.database}"]
    arguments += ["--export-root", str(home.exports)]
    if stack.target is not None:
        arguments += ["--target", f"{stack.target.name}={reachable(stack.target.address)}"]
    roots = list(stack.data_roots)
    if not _is_confined(stack, stack.api.address):
        # Any file may be named, and relative names still have a place to start from.
        roots.append("/")
    return _program(API, "control_api", [*arguments, *_repeated("--data-root", roots)], stack, home)


def _target(stack: Stack, target: TargetPart, home: Home) -> Program:
    settings = target.model.model_dump(exclude={"model"}, exclude_none=True)
    arguments = ["serve", "--model", target.model.model]
    arguments += _repeated("--set", [f"target.{key}={_toml(value)}" for key, value in settings.items()])
    arguments += ["--listen", target.address, "--ledger", str(home.ledger)]
    if _is_confined(stack, target.address):
        arguments += _repeated("--data-root", stack.data_roots)
    devices = target.device.split(",")
    if len(devices) > 1:  # an engine process for each, which the server shows its GPU
        threads = _threads(target.threads and max(1, target.threads // len(devices)))
        ranks = ["--tensor-parallel", str(target.tensor_parallel)] if target.tensor_parallel > 1 else []
        arguments += ["--devices", target.device, *ranks, *threads]
        return _program(TARGET, "target_server", arguments, stack, home)
    arguments += _threads(target.threads)
    # It knows a GPU only as `cuda`: it is shown the one that is meant.
    device, _, number = target.device.partition(":")
    seen = {"CUDA_VISIBLE_DEVICES": visible_gpu(int(number or 0))} if device == "cuda" else {}
    return _program(TARGET, "target_server", [*arguments, "--device", device], stack, home, seen)


def _trainer(stack: Stack, trainer: TrainerPart, home: Home) -> Program:
    arguments = ["worker", "--api", api_url(stack), "--name", trainer.name, "--device", trainer.device]
    arguments += ["--runs", str(home.runs), "--state", str(home.trainers / trainer.name), *_threads(trainer.threads)]
    return _program(trainer.name, "drafter_trainer", arguments, stack, home)


def _program(
    name: str, module: str, arguments: Sequence[str], stack: Stack, home: Home, more: dict[str, str] | None = None
) -> Program:
    token = ["--token-file", stack.token_file] if stack.token_file else []
    # -P: the home is no place to import from.
    return Program(
        name=name,
        argv=(sys.executable, "-P", "-m", module, *arguments, *token),
        environment=tuple(sorted({"PYTHONUNBUFFERED": "1", **(more or {})}.items())),
        directory=home.root,
        log=home.log_file(name),
        lock=home.locks / f"{name}.lock",
    )


def _is_confined(stack: Stack, address: str) -> bool:
    """Whether files may be named in the data roots only: where asked for, and where other machines can ask."""
    return stack.confined or not ListenAddress.parse(address).is_loopback


def _threads(count: int | None) -> list[str]:
    return [] if count is None else ["--threads", str(count)]


def _repeated(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def _toml(value: Any) -> str:
    return json.dumps(value)
