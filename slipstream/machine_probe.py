"""What this machine has: cores, memory, shared memory, accelerators. Torch-free; torch is asked in a child process."""

import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

_CGROUP = Path("/sys/fs/cgroup")
_TORCH_SECONDS = 120.0
"""A cold import of torch from a slow disk takes most of a minute."""
_POLICY_SECONDS = 240.0
"""That, and a kernel's compilation forward and backward."""


class GpuFacts(BaseModel):
    """One device that torch can use."""

    model_config = ConfigDict(frozen=True)

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    shared_memory_per_block_bytes: int | None
    """Most that a kernel can opt in to; None where torch does not tell."""


class TorchFacts(BaseModel):
    """What torch says of itself and of the devices it sees; `problem` says why it says nothing."""

    model_config = ConfigDict(frozen=True)

    version: str | None = None
    cuda_build: str | None = None
    """CUDA version torch was built for; None for a CPU build."""
    gpus: tuple[GpuFacts, ...] = ()
    warnings: tuple[str, ...] = ()
    problem: str | None = None


class PolicyFacts(BaseModel):
    """Whether compiled attention can be trusted on the first GPU: what was shown, or the problem and its remedy."""

    model_config = ConfigDict(frozen=True)

    passed: tuple[str, ...] = ()
    problem: str | None = None
    remedy: str = ""


def probe_policy() -> PolicyFacts:
    """Let the trainer's own start examine the first GPU, in a child process. Never raises: a failure is a fact."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    report = "Report this with what is printed above."
    try:
        child = subprocess.run(
            [sys.executable, "-m", "drafter_trainer", "doctor", "--json"],
            capture_output=True,
            text=True,
            timeout=_POLICY_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": visible},
        )
    except subprocess.TimeoutExpired:
        return PolicyFacts(problem=f"the examination did not end within {_POLICY_SECONDS:.0f} s", remedy=report)
    try:
        # Libraries may print before; the facts are the last line.
        return PolicyFacts.model_validate(json.loads(child.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError, ValidationError):
        last_words = (child.stderr.strip() or f"exit status {child.returncode}").splitlines()[-1]
        return PolicyFacts(problem=f"the examination failed: {last_words}", remedy=report)


def probe_torch() -> TorchFacts:
    """Import torch in a child process and ask it. Never raises: a torch that cannot be imported is a fact."""
    if package_version("torch") is None:
        return TorchFacts(problem="torch is not installed")
    try:
        child = subprocess.run(
            [sys.executable, "-m", "slipstream.torch_facts"],
            capture_output=True,
            text=True,
            timeout=_TORCH_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(problem=f"torch gave no answer within {_TORCH_SECONDS:.0f} s")
    if child.returncode != 0:
        last_words = (child.stderr.strip() or f"exit status {child.returncode}").splitlines()[-1]
        return TorchFacts(problem=f"torch cannot be used: {last_words}")
    try:
        # Libraries may print before; the facts are the last line.
        return TorchFacts.model_validate(json.loads(child.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError, ValidationError) as error:
        return TorchFacts(problem=f"torch's answer is not readable: {error}")


def probe_accelerator() -> str | None:
    """Name of the first GPU that torch can use; None when there is none (or no usable torch)."""
    gpus = probe_torch().gpus
    return gpus[0].name if gpus else None


def package_version(distribution: str) -> str | None:
    """Version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else None


def usable_cores() -> int:
    """Cores this process may keep busy: its CPU affinity, cut by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _cpu_quota() -> float | None:
    """Cores granted by the control group (version 2, then 1); None without a limit."""
    words = _read(_CGROUP / "cpu.max").split()
    if not words:
        words = [_read(_CGROUP / "cpu" / "cpu.cfs_quota_us"), _read(_CGROUP / "cpu" / "cpu.cfs_period_us")]
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return None
    return int(words[0]) / max(1, int(words[1]))


def memory_bytes() -> tuple[int, int]:
    """Memory of this machine, or of the container where that is less: total and available."""
    values = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        key, _, rest = line.partition(":")
        values[key] = int(rest.split()[0]) * 1024
    if "MemTotal" not in values:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    total, available = values["MemTotal"], values.get("MemAvailable", values["MemTotal"])
    limit, used = _container_memory()
    return min(total, limit or total), min(available, max(0, limit - used) if limit else available)


def peak_resident_bytes() -> int:
    """Most memory that this program has had, without shared memory that it maps now: that is its owner's, as a target
    server's packs are. Not ru_maxrss, if the kernel says another: what starts a process counts there with all of its
    own memory, be it a notebook with a model in it."""
    found = {}
    for line in _read(Path("/proc/self/status")).splitlines():
        key, _, rest = line.partition(":")
        if key in ("VmHWM", "RssShmem"):
            found[key] = int(rest.split()[0]) << 10
    if "VmHWM" in found:
        return found["VmHWM"] - found.get("RssShmem", 0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _container_memory() -> tuple[int | None, int]:
    """Limit and use of the control group (version 2, then 1), in bytes; the page cache it could drop is not use."""
    for limit_file, use_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, use = _read(_CGROUP / limit_file), _read(_CGROUP / use_file)
        if limit.isdecimal() and use.isdecimal():
            statistics = _read((_CGROUP / use_file).parent / "memory.stat").splitlines()
            cached = sum(int(line.split()[1]) for line in statistics if line.startswith(f"{cache_key} "))
            return int(limit), max(0, int(use) - cached)
    return None, 0


def in_container() -> bool:
    """Whether the usual container runtimes left their mark."""
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def _read(path: Path) -> str:
    """Text of a kernel file; empty where this kernel or control group has none."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
