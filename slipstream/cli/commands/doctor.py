"""`slipstream doctor`: what this machine has, what is missing, and what will run where, in words."""

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.cli.machine import Finding, Machine
    from slipstream.machine_probe import GpuFacts

_CANNOT_RUN = 4
"""The exit status that `SlipstreamError` has for what a machine cannot do."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine has, what is missing, and what will run where",
        description="Exit status: 0 when the demo can run here, 4 when not (each problem comes with its remedy).",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")


def run(args: argparse.Namespace) -> int:
    """Inspect, print, and say by the exit status whether the demo can run."""
    from slipstream.cli.machine import findings_of, inspect_machine

    machine = inspect_machine()
    findings = findings_of(machine)
    can_run = all(finding.level != "problem" for finding in findings)
    if args.output == "json":
        print(_as_json(machine, findings, can_run))
    else:
        print("\n".join(_as_text(machine, findings, can_run)))
    return 0 if can_run else _CANNOT_RUN


def _as_json(machine: "Machine", findings: "list[Finding]", can_run: bool) -> str:
    import json

    from slipstream.cli.machine import abilities_of, placement_of
    from slipstream.run_spec.architectures import installed_architectures

    return json.dumps(
        {
            "machine": machine.model_dump(mode="json"),
            "drafter_architectures": installed_architectures(),
            "abilities": abilities_of(machine),
            "placement": placement_of(machine),
            "findings": [finding.model_dump() for finding in findings],
            "demo_can_run": can_run,
        },
        indent=2,
    )


def _as_text(machine: "Machine", findings: "list[Finding]", can_run: bool) -> Iterator[str]:
    from slipstream.cli.machine import PORTS, abilities_of, gib, placement_of
    from slipstream.run_spec.architectures import installed_architectures

    yield from _section("versions", {name: version or "not installed" for name, version in machine.versions.items()})
    yield from _section("drafters", {"architectures": ", ".join(installed_architectures())})
    yield from _section("devices", _devices(machine))
    shared = machine.shared_memory
    where = "this container" if machine.container else "this machine"
    yield from _section(
        "room",
        {
            "cores": f"{machine.cores} usable",
            "memory": f"{gib(machine.memory_available_bytes)} free of {gib(machine.memory_total_bytes)} in {where}",
            "shared memory": (
                f"{gib(shared.free_bytes)} free of {gib(shared.total_bytes)} in {shared.path}" if shared else "none"
            ),
            "disk": f"{gib(machine.disk.free_bytes)} free in {machine.disk.path}",
        },
    )
    yield from _section(
        "ports",
        {
            f"{port}": f"{'in use' if service in machine.ports_in_use else 'free'} ({service})"
            for service, port in PORTS.items()
        },
    )
    if machine.compile_guards:
        yield from _section(
            "what could make compiled attention dense, and what this torch does", machine.compile_guards
        )
    yield "what a trainer can do here"
    for device, abilities in abilities_of(machine).items():
        yield from (f"  {device if number == 0 else '':<5}  {words}" for number, words in enumerate(abilities))
    yield ""
    yield from ("slipstream demo would run", *(f"  {line}" for line in placement_of(machine)), "")
    for finding in findings:
        yield f"{finding.level}: {finding.text}"
        yield f"  remedy: {finding.remedy}"
    yield "The demo can run here." if can_run else "The demo cannot run here yet: see the problems above."


def _devices(machine: "Machine") -> dict[str, str]:
    torch = machine.torch
    if torch.problem is not None:
        return {"torch": torch.problem}
    devices = {f"GPU {index}": _gpu(gpu) for index, gpu in enumerate(torch.gpus)}
    build = f"CUDA {torch.cuda_build}" if torch.cuda_build else "CPU build"
    return {"torch": build, "driver": machine.driver or "none"} | (devices or {"GPU": "none that torch can use"})


def _gpu(gpu: "GpuFacts") -> str:
    from slipstream.cli.machine import gib

    major, minor = gpu.compute_capability
    shared = gpu.shared_memory_per_block_bytes
    words = f"{gpu.name}, {gib(gpu.memory_bytes)}, compute capability {major}.{minor}"
    return f"{words}, {shared >> 10} KiB of shared memory per block" if shared else words


def _section(title: str, rows: Mapping[str, str]) -> Iterator[str]:
    width = max(map(len, rows), default=0)
    yield title
    yield from (f"  {name:<{width}}  {value}" for name, value in rows.items())
    yield ""
