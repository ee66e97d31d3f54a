"""The command lines of a stack: what each process is told."""

from pathlib import Path

import pytest

from slipstream.launcher.home import Home
from slipstream.launcher.programs import Program, api_url, programs_of, reachable
from slipstream.launcher.stack import Stack, TrainerPart
from tests.unit.launcher.stacks import a_stack


def programs(stack: Stack) -> dict[str, Program]:
    return programs_of(stack, Home(Path("/stack")))


def flags(program: Program, flag: str) -> list[str]:
    return [value for name, value in zip(program.argv, program.argv[1:], strict=False) if name == flag]


def listening(stack: Stack, address: str) -> Stack:
    assert stack.target is not None
    return stack.model_copy(
        update={
            "api": stack.api.model_copy(update={"address": address}),
            "target": stack.target.model_copy(update={"address": address}),
        }
    )


def test_a_loopback_stack() -> None:
    found = programs(a_stack())
    assert list(found) == ["control-api", "target", "cpu"]
    api, target, trainer = found.values()
    assert flags(api, "--target") == ["local=127.0.0.1:50051"]
    assert flags(api, "--data-root") == ["/data/recipe", "/data", "/"], "any file may be named"
    assert flags(target, "--data-root") == []
    assert flags(target, "--model") == ["some/model"]
    settings = {'target.dtype="float32"', "target.trust_remote_code=false", 'target.compile="auto"'}
    assert set(flags(target, "--set")) == settings
    assert flags(target, "--device") == ["cpu"] and flags(target, "--threads") == ["1"]
    assert flags(trainer, "--api") == ["http://127.0.0.1:8080"] and flags(trainer, "--name") == ["cpu"]
    assert flags(trainer, "--runs") == ["/stack/runs"] and flags(trainer, "--state") == ["/stack/trainers/cpu"]
    assert not any("--token-file" in program.argv for program in found.values())


def test_other_machines_are_held_to_the_data_roots() -> None:
    found = programs(listening(a_stack(token_file="/token"), "0.0.0.0:8080"))
    for name in ("control-api", "target"):
        assert flags(found[name], "--data-root") == ["/data/recipe", "/data"]
    assert all(flags(program, "--token-file") == ["/token"] for program in found.values())
    assert flags(found["control-api"], "--target") == ["local=127.0.0.1:8080"]
    assert flags(found["cpu"], "--api") == ["http://127.0.0.1:8080"]


def test_data_roots_that_were_asked_for_hold_everybody() -> None:
    found = programs(a_stack(confined=True))
    assert (
        flags(found["control-api"], "--data-root") == flags(found["target"], "--data-root") == ["/data/recipe", "/data"]
    )


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    stack = a_stack(trainers=(TrainerPart(name="gpu2", device="cuda:2"),))
    assert stack.target is not None
    stack = stack.model_copy(update={"target": stack.target.model_copy(update={"device": "cuda:1", "threads": None})})
    found = programs(stack)
    assert dict(found["target"].environment)["CUDA_VISIBLE_DEVICES"] == "5"
    assert flags(found["target"], "--device") == ["cuda"] and "--threads" not in found["target"].argv
    # An agent maps the number itself.
    assert "CUDA_VISIBLE_DEVICES" not in dict(found["gpu2"].environment)
    assert flags(found["gpu2"], "--device") == ["cuda:2"]


def test_several_devices_are_several_engines() -> None:
    stack = a_stack()
    assert stack.target is not None
    for device, threads, each in (("cuda:0,cuda:1", None, []), ("cpu,cpu", 4, ["2"]), ("cpu,cpu,cpu", 2, ["1"])):
        part = stack.target.model_copy(update={"device": device, "threads": threads})
        target = programs(stack.model_copy(update={"target": part}))["target"]
        assert flags(target, "--devices") == [device] and flags(target, "--device") == []
        assert flags(target, "--threads") == each and flags(target, "--tensor-parallel") == []
        assert "CUDA_VISIBLE_DEVICES" not in dict(target.environment), "the server shows each engine its own"


def test_devices_that_share_the_layers() -> None:
    stack = a_stack()
    assert stack.target is not None
    part = stack.target.model_copy(update={"device": "cpu,cpu,cpu,cpu", "tensor_parallel": 2})
    target = programs(stack.model_copy(update={"target": part}))["target"]
    assert flags(target, "--devices") == ["cpu,cpu,cpu,cpu"] and flags(target, "--tensor-parallel") == ["2"]


def test_programs_are_told_apart_by_what_they_are_told() -> None:
    one, same = programs(a_stack()), programs(a_stack())
    other = programs(a_stack(token_file="/token"))
    assert one["cpu"].fingerprint == same["cpu"].fingerprint != other["cpu"].fingerprint


def test_addresses_to_connect_to() -> None:
    assert reachable("0.0.0.0:1") == "127.0.0.1:1"
    assert reachable("[::]:1") == "[::1]:1"
    assert reachable("10.0.0.1:1") == "10.0.0.1:1"
    assert api_url(a_stack()) == "http://127.0.0.1:8080"
