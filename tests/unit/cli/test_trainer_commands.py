"""`slipstream trainer|target|checkpoint …` against a served control API."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream import machine_probe
from slipstream.launcher.home import Home, SupervisorState, try_lock
from slipstream.machine_probe import GpuFacts, TorchFacts
from tests.fakes.control_plane import Desk, checkpoint, report
from tests.unit.cli.conftest import Command


def test_trainer_ls(desk: Desk, slipstream: Command) -> None:
    desk.running()
    gpu = {"kind": "cuda", "index": 5}
    desk.trainer("gpu5", devices=[gpu], versions={"slipstream": "1.2.3"})
    answer = slipstream("trainer", "ls")
    assert answer.status == 0
    header, *rows = answer.out.splitlines()
    assert header.split() == ["NAME", "STATUS", "RUN", "DEVICES", "HOST", "HEARD", "OF", "VERSION"]
    assert [row.split()[:5] for row in rows] == [
        ["t1", "BUSY", "demo", "cpu", "box"],
        ["gpu5", "FREE", "-", "cuda:5", "box"],
    ]
    assert rows[1].endswith("1.2.3")
    listed = json.loads(slipstream("trainer", "ls", "-o", "json").out)["trainers"]
    assert [one["name"] for one in listed] == ["t1", "gpu5"]


def test_no_trainers(desk: Desk, slipstream: Command) -> None:
    answer = slipstream("trainer", "ls")
    assert (answer.out, answer.err) == ("no trainers\n", "next: slipstream trainer start\n")


def test_attach_and_detach(desk: Desk, slipstream: Command) -> None:
    desk.target(status="UNREACHABLE")
    desk.run()
    desk.trainer()
    answer = slipstream("trainer", "attach", "t1", "demo")
    assert (answer.status, answer.out) == (0, "t1 works on demo\n")
    assert answer.err == "next: slipstream run watch demo\n"
    answer = slipstream("trainer", "detach", "t1")
    assert (answer.status, answer.out) == (0, "t1 saves demo and leaves it; that run waits for another trainer\n")
    assert answer.err == "next: slipstream trainer ls\nnext: slipstream trainer attach TRAINER demo\n"
    assert desk.beat()["assignment"]["desired_state"] == "STOPPED"


def test_attach_and_detach_as_json(desk: Desk, slipstream: Command) -> None:
    desk.target(status="UNREACHABLE")
    desk.run()
    desk.trainer()
    answer = slipstream("trainer", "attach", "t1", "demo", "-o", "json")
    assert (json.loads(answer.out)["run"], answer.err) == ("demo", "")
    answer = slipstream("trainer", "detach", "t1", "-o", "json")
    assert (json.loads(answer.out)["name"], answer.err) == ("t1", "")


def test_attach_refusals(desk: Desk, slipstream: Command) -> None:
    desk.running()
    desk.trainer("t2")
    for arguments, status, words in [
        (["attach", "t1", "demo"], 14, "Trainer 't1' has a run"),
        (["attach", "t2", "demo"], 14, "Run 'demo' has a trainer: t1."),
        (["attach", "t2", "dmo"], 13, "Did you mean demo? `slipstream run ls` lists the runs."),
        (["attach", "t3", "demo"], 13, "There is no trainer 't3'."),
        (["attach", "demo", "t2"], 13, "demo is a run. `slipstream trainer ls` lists the trainers."),
        (["attach", "t2", "a/b"], 2, "body.run"),
        (["attach", "t2"], 2, ""),
        (["detach", "t2"], 14, "Trainer 't2' works on nothing."),
        (["detach", "t/1"], 13, "Nothing is called 't/1'."),
    ]:
        answer = slipstream("trainer", *arguments)
        assert (answer.status, answer.out) == (status, ""), arguments
        assert words in answer.err, arguments


def test_remove(desk: Desk, slipstream: Command) -> None:
    work = desk.running()
    answer = slipstream("trainer", "remove", "t1")
    assert (answer.status, answer.out) == (14, "") and "holds run 'demo'" in answer.err
    desk.beat("t1", report(work, "STOPPED"), leaving=True)
    assert slipstream("trainer", "ls").out.splitlines()[1].split()[:3] == ["t1", "STOPPED", "-"]
    answer = slipstream("trainer", "remove", "t1")
    assert (answer.status, answer.out, answer.err) == (0, "t1 is forgotten\n", "next: slipstream trainer ls\n")
    answer = slipstream("trainer", "remove", "t1", "-o", "json")
    assert answer.status == 13 and "There is no trainer 't1'" in answer.err


def test_attach_to_a_run_at_rest_names_the_verbs(desk: Desk, slipstream: Command) -> None:
    desk.target()
    desk.run()
    desk.verb("stop")
    desk.trainer()
    answer = slipstream("trainer", "attach", "t1", "demo")
    assert answer.status == 14
    assert "`slipstream run resume demo`" in answer.err


# ---- start


class Replaced(Exception):  # noqa: N818 - no error
    """This process would now be another program."""


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that this process would have become."""
    commands: list[list[str]] = []

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        commands.append([*command[1:], f"token={environment.get('SLIPSTREAM_TOKEN', '')}"])
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    return commands


def test_start_in_the_foreground(
    slipstream: Command, replaced: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    flags = ("--api", "http://far:8080", "--token-file", token, "--name", "gpu5", "--device", "cuda:5")
    with pytest.raises(Replaced):
        slipstream("trainer", "start", *flags, "--runs", "/data/runs")
    # Whether it may join is not known yet.
    assert "next:" not in capsys.readouterr().err
    assert replaced == [
        [
            *("-m", "drafter_trainer", "worker", "--api", "http://far:8080", "--device", "cuda:5"),
            *("--name", "gpu5", "--runs", "/data/runs", "token=secret"),
        ]
    ]


@pytest.fixture
def stack(home: Path) -> Iterator[Path]:
    """A stack that is up: its files, and a supervisor's lock that is held."""
    Home(home).make()
    state = SupervisorState(
        pid=os.getpid(),
        state="READY",
        api="http://127.0.0.1:1",
        dashboard="",
        token_file=None,
        target=None,
        processes=(),
    )
    Home(home).supervisor_file.write_text(state.model_dump_json())
    parts = {"api": {"listen": "127.0.0.1:0", "address": "127.0.0.1:1"}, "target": None, "data_roots": []}
    Home(home).stack_file.write_text(
        json.dumps({"version": 1, "trainers": [{"name": "cpu", "device": "cpu"}], **parts})
    )
    # flock belongs to the open file: another one of this process is refused as that of another process would be.
    lock = try_lock(Home(home).supervisor_lock)
    assert lock is not None
    with lock:
        yield home


def test_start_in_a_stack(slipstream: Command, stack: Path, replaced: list[list[str]]) -> None:
    answer = slipstream("trainer", "start", "--device", "cpu")
    assert (answer.status, answer.out) == (0, f"cpu-2 joins the stack in {stack}\n")
    assert answer.err == "next: slipstream trainer ls\n"
    answer = slipstream("trainer", "start", "--device", "cpu", "--name", "third", "-o", "json")
    assert json.loads(answer.out) == {"name": "third", "home": str(stack)}
    names = [one["name"] for one in json.loads(Home(stack).stack_file.read_text())["trainers"]]
    assert names == ["cpu", "cpu-2", "third"]
    for arguments, status in [
        (["--device", "gpu"], 2),
        (["--device", "cpu", "--name", "cpu"], 14),
        (["--device", "cpu", "--name", "A"], 2),
        (["--device", "cpu", "--runs", "r"], 2),
    ]:
        assert slipstream("trainer", "start", *arguments).status == status, arguments
    assert replaced == []


def test_a_gpu_that_is_not_there_joins_no_stack(
    slipstream: Command, stack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = GpuFacts(name="GPU", memory_bytes=1, compute_capability=(9, 0), shared_memory_per_block_bytes=None)
    for gpus, device, status in [((), "cuda", 4), ((gpu,), "cuda:1", 4), ((gpu,), "cuda:0", 0)]:
        monkeypatch.setattr(machine_probe, "probe_torch", lambda gpus=gpus: TorchFacts(version="2", gpus=gpus))
        answer = slipstream("trainer", "start", "--device", device)
        assert answer.status == status, (device, answer.err)
        assert status == 0 or f"--device names {device}, but torch sees " in answer.err
    names = [one["name"] for one in json.loads(Home(stack).stack_file.read_text())["trainers"]]
    assert names == ["cpu", "gpu0"]


def test_stop_in_a_stack(slipstream: Command, stack: Path) -> None:
    answer = slipstream("trainer", "stop", "cpu")
    assert (answer.status, answer.err) == (0, "next: slipstream trainer ls\n")
    assert answer.out == "cpu saves and leaves the stack; it is listed as STOPPED until it is removed\n"
    assert json.loads(Home(stack).stack_file.read_text())["trainers"] == []
    answer = slipstream("trainer", "stop", "cpu")
    assert answer.status == 13
    assert "no trainer 'cpu'" in answer.err


def test_stop_without_a_stack(slipstream: Command, home: Path) -> None:
    answer = slipstream("trainer", "stop", "cpu")
    assert answer.status == 15
    assert "no stack is up in" in answer.err
    assert "started by hand leaves with Ctrl-C or SIGTERM" in answer.err


@pytest.mark.parametrize("flags", [("--foreground",), ("--api", "http://far:1")])
def test_start_beside_a_stack(
    slipstream: Command, stack: Path, replaced: list[list[str]], flags: tuple[str, ...]
) -> None:
    with pytest.raises(Replaced):
        slipstream("trainer", "start", "--device", "cpu", *flags)
    assert len(replaced) == 1


# ---- targets and checkpoints


def test_targets(desk: Desk, slipstream: Command) -> None:
    desk.serves("some/model", None)
    desk.target("away", status="UNREACHABLE")
    answer = slipstream("target", "ls")
    assert answer.status == 0
    rows = [line.split() for line in answer.out.splitlines()]
    assert rows[0] == ["NAME", "STATUS", "MODEL", "ADDRESS", "CHECKED", "DETAIL"]
    assert rows[1] == ["local", "REACHABLE", "some/model", "127.0.0.1:1", "-"]
    assert rows[2] == ["away", "UNREACHABLE", "-", "127.0.0.1:1", "-", "away"]
    names = [one["name"] for one in json.loads(slipstream("target", "ls", "-o", "json").out)["targets"]]
    assert names == ["local", "away"]


def test_target_get_asks_it_now(desk: Desk, slipstream: Command) -> None:
    desk.serves("some/model", None)
    answer = slipstream("target", "get", "local")
    assert answer.status == 0
    fields = dict(line.split(maxsplit=1) for line in answer.out.splitlines())
    assert (fields["status"], fields["model"]) == ("UNREACHABLE", "some/model")
    assert answer.err == "next: slipstream target ls\n"
    assert json.loads(slipstream("target", "get", "local", "-o", "json").out)["status"] == "UNREACHABLE"
    answer = slipstream("target", "get", "lokal")
    assert (answer.status, answer.out) == (13, "")
    assert "Did you mean local?" in answer.err


def test_no_targets(desk: Desk, slipstream: Command) -> None:
    answer = slipstream("target", "ls")
    assert answer.out.startswith("no targets")
    assert answer.err == "next: slipstream up\n"


def test_checkpoints(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    answer = slipstream("checkpoint", "ls", "demo")
    assert (answer.out, answer.err) == ("no checkpoint yet\n", "next: slipstream run watch demo\n")
    desk.beat(report=report(assignment, "RUNNING", checkpoints=[checkpoint(20), checkpoint(40)]))
    answer = slipstream("checkpoint", "ls", "demo")
    assert answer.status == 0
    assert [line.split()[0] for line in answer.out.splitlines()] == ["STEP", "20", "40"]
    assert answer.err == "next: slipstream eval demo\n"
    listed = json.loads(slipstream("checkpoint", "ls", "demo", "-o", "json").out)["checkpoints"]
    assert [one["step"] for one in listed] == [20, 40]
    assert slipstream("checkpoint", "ls", "nobody").status == 13


def test_export_of_a_checkpoint_that_is_not_here(desk: Desk, slipstream: Command) -> None:
    assignment = desk.running()
    flags = ("--to", "vllm", "--output", "out")
    answer = slipstream("checkpoint", "export", "demo", *flags)
    assert (answer.status, "has no checkpoint yet\n  remedy: One is written every " in answer.err) == (11, True)
    desk.beat(report=report(assignment, "RUNNING", checkpoints=[checkpoint(20), checkpoint(40)]))
    answer = slipstream("checkpoint", "export", "demo@30", *flags)
    assert (answer.status, "no checkpoint of step 30, expected one of: 20, 40" in answer.err) == (11, True)
    answer = slipstream("checkpoint", "export", "demo@20", *flags)
    assert answer.status == 11
    assert "lies at /runs/demo/step-20 on the trainer's machine" in answer.err
    assert "slipstream checkpoint export /runs/demo/step-20 --to vllm" in answer.err
    answer = slipstream("checkpoint", "export", "nobody@20", *flags)
    assert answer.status == 13 and "nor is there nobody, runs/nobody, " in answer.err


@pytest.mark.parametrize(
    ("reason", "then"),
    [
        ("INTERNAL", "next: slipstream run logs demo --tail 50\nnext: slipstream run resume demo\n"),
        (
            "DATA_INVALID",
            "change first: the data that the message names\n"
            "next: slipstream run logs demo --tail 50\nnext: slipstream run resume demo\n",
        ),
    ],
)
def test_no_checkpoint_of_a_run_that_failed(desk: Desk, slipstream: Command, reason: str, then: str) -> None:
    assignment = desk.running()
    ended = {"child": 1, "reason": reason, "message": "It broke.", "will_restart": False}
    desk.beat(report=report(assignment, "FAILED", exit=ended))
    answer = slipstream("checkpoint", "ls", "demo")
    assert (answer.status, answer.out) == (0, "no checkpoint\n")
    assert answer.err == then
    assert json.loads(slipstream("checkpoint", "ls", "demo", "-o", "json").out) == {"checkpoints": []}
