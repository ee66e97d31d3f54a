"""The line between agent and training process, at its other end: hang-ups, signals, descriptors that are none."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drafter_trainer.agent_line import AgentLine
from drafter_trainer.cli import main
from drafter_trainer.wait_notice import WaitNotice
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.reasons import Reason
from tests.fakes.control_plane import SPEC
from tests.fakes.processes import ManagedProcess


class Listener(AgentLine):
    """An agent's line that ends here."""

    def __init__(self, hear: Callable[[Reason | None], None]) -> None:
        super().__init__(None)
        self._hear = hear

    def waits_for_target(self, reason: Reason | None) -> None:
        self._hear(reason)


def test_news_and_the_hang_up() -> None:
    agent, child = socket.socketpair()
    line = AgentLine(child.detach())
    gone = threading.Event()
    line.on_hang_up(gone.set)
    line.waits_for_target(Reason.TARGET_LOADING)
    line.joined(3, 9)
    line.ended("finished", 9)
    with agent.makefile("r") as news:
        told = [json.loads(news.readline()) for _ in range(3)]
    assert told == [
        {"waits_for_target": "TARGET_LOADING"},
        {"next_step": 3, "total_steps": 9},
        {"end": "finished", "next_step": 9},
    ]
    assert not gone.is_set()
    agent.close()
    assert gone.wait(30.0)
    line.joined(4, 9)  # to nobody


def test_what_threads_tell_at_once_is_told_line_by_line() -> None:
    agent, child = socket.socketpair()
    line = AgentLine(child.detach())
    long = {"examples": ["x" * 200_000]}
    with ThreadPoolExecutor(4) as threads, agent, agent.makefile("r") as news:
        for step in range(20):
            threads.submit(line.data_read, long)
            threads.submit(line.joined, step, 20)
        told = [json.loads(news.readline()) for _ in range(40)]
    assert sorted(one["next_step"] for one in told if "next_step" in one) == list(range(20))
    assert sum("data" in one for one in told) == 20


def test_a_commit_that_waits_is_not_over_because_packs_still_come() -> None:
    agent, child = socket.socketpair()
    notice = WaitNotice("h:1", AgentLine(child.detach()))
    notice(Reason.LEDGER_UNWRITABLE, 0.1)
    with ThreadPoolExecutor(1) as feeder:
        feeder.submit(notice, Reason.TARGET_LOADING, 0.1).result(30)
        feeder.submit(notice.over).result(30)
    notice(Reason.LEDGER_UNWRITABLE, 0.1)
    notice.over()
    notice.greeted("shm")
    with agent.makefile("r") as news:
        told = [json.loads(news.readline()) for _ in range(5)]
    waits = [Reason.LEDGER_UNWRITABLE, Reason.TARGET_LOADING, Reason.LEDGER_UNWRITABLE, None]
    assert told == [*({"waits_for_target": reason} for reason in waits), {"transport": "shm"}]


def test_the_reason_that_was_told_is_one_for_which_somebody_waits() -> None:
    heard: list[Reason | None] = []
    notice = WaitNotice("h:1", Listener(heard.append), clock=lambda: 0.0)
    with ThreadPoolExecutor(1) as feeder:
        notice(Reason.TARGET_UNREACHABLE, 0.1)
        feeder.submit(notice, Reason.LEDGER_UNWRITABLE, 0.1).result(30)
        feeder.submit(notice, Reason.TARGET_UNREACHABLE, 0.1).result(30)
        assert heard[2:] == [Reason.TARGET_UNREACHABLE], "the reason told last is nobody's any more"
        notice(Reason.TARGET_LOADING, 0.1)
        notice.over()
        assert heard[3:] == [Reason.TARGET_LOADING, Reason.TARGET_UNREACHABLE], "why the feeder waits on"
        feeder.submit(notice.over).result(30)
    assert heard[5:] == [None]


def test_who_begins_to_wait_while_it_is_told_that_nobody_does_is_told_of_later() -> None:
    heard: list[Reason | None] = []

    def hear(reason: Reason | None) -> None:
        if reason is None:
            feeder.start()
            feeder.join(0.1)  # it gets as far as it can, whatever that is
        heard.append(reason)

    notice = WaitNotice("h:1", Listener(hear))
    feeder = threading.Thread(target=lambda: notice(Reason.TARGET_UNREACHABLE, 0.1))
    notice(Reason.TARGET_LOADING, 0.1)
    notice.over()
    feeder.join(30)
    assert heard == [Reason.TARGET_LOADING, None, Reason.TARGET_UNREACHABLE]


def test_the_trainer_tells_when_it_waits_for_its_target() -> None:
    agent, child = socket.socketpair()
    notice = WaitNotice("h:1", AgentLine(child.detach()))
    for reason in (Reason.TARGET_UNREACHABLE, Reason.TARGET_UNREACHABLE, Reason.TARGET_LOADING):
        notice(reason, 0.1)
    notice.over()
    notice.over()
    notice(Reason.TARGET_UNREACHABLE, 0.1)
    notice.greeted("shm")
    with agent.makefile("r") as news:
        told = [json.loads(news.readline()) for _ in range(5)]
    assert [one["waits_for_target"] for one in told[:4]] == [
        "TARGET_UNREACHABLE",
        "TARGET_LOADING",
        None,
        "TARGET_UNREACHABLE",
    ]
    assert told[4] == {"transport": "shm"}
    agent.close()


def test_a_process_without_an_agent_tells_nobody() -> None:
    line = AgentLine(None)
    line.on_hang_up(lambda: pytest.fail("nobody hung up"))
    line.ended("finished", 1)


def test_a_descriptor_that_is_no_socket(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        arguments = ["run", "recipe.toml", "--agent-fd", str(os.dup(file.fileno()))]
        child = subprocess.run(
            [sys.executable, "-m", "drafter_trainer", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            pass_fds=[int(arguments[-1])],
        )
        os.close(int(arguments[-1]))
    assert child.returncode == 2
    assert "is no socket" in child.stderr and "Traceback" not in child.stderr


def test_an_agent_that_has_gone_asks_once_and_a_new_one_may_ask_again() -> None:
    program = (
        "import threading; from drafter_trainer.stop_request import StopRequest\n"
        "from slipstream.telemetry.logs import configure_logging; configure_logging('child')\n"
        "with StopRequest() as stop:\n"
        "    stop.agent_gone(); stop.agent_gone(); threading.Event().wait()\n"
    )
    with ManagedProcess([sys.executable, "-c", program]) as process:
        process.wait_for_line('stop_requested by="the end of the agent"')
        process.terminate()
        process.wait_for_line("stop_requested by=SIGTERM")
        process.terminate()
        assert process.wait_exit() == 128 + signal.SIGTERM


def test_a_definition_in_json_is_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "definition.json"
    path.write_text(json.dumps(SPEC))
    loaded = load_recipe(path, ["train.max_steps=7"])
    assert (loaded.spec.name, loaded.spec.train.max_steps) == ("demo", 7)
    assert loaded.spec.data.files == ("/data/a.jsonl",), "paths are left as they are"
    assert main(["run", str(path), "--dry-run"]) == 0
    assert "definition.json" in capsys.readouterr().out
    for text in ("{", "[1]", '{"name": "demo"}'):
        path.write_text(text)
        assert main(["run", str(path), "--dry-run"]) == 2
        assert "remedy:" in capsys.readouterr().err
