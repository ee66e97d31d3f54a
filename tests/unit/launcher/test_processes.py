"""One supervised process, a real one: started, adopted, started again with back-off, given up, ended."""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.launcher.ending import Leftover, end_in_order, end_strays, found_alive
from slipstream.launcher.home import Home, is_held
from slipstream.launcher.liveness import Handle, holders, marked
from slipstream.launcher.processes import RestartPolicy, SupervisedProcess
from slipstream.launcher.programs import Program

POLICY = RestartPolicy(first_delay=1.0, most_delay=4.0, limit=3, healthy_seconds=30.0)
STAYS = "import signal; print('here', flush=True); signal.pause()"
IGNORES = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("here", flush=True)
while True:
    signal.pause()
"""


class Bench:
    """A home, a clock that the test turns, and what was said."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root)
        self.home.make()
        self.now = 100.0
        self.said: list[str] = []

    def program(self, code: str, name: str = "cpu") -> Program:
        return Program(
            name=name,
            argv=(sys.executable, "-c", code),
            environment=(),
            directory=self.home.root,
            log=self.home.log_file(name),
            lock=self.home.locks / f"{name}.lock",
        )

    def supervise(self, program: Program) -> SupervisedProcess:
        return SupervisedProcess(program, POLICY, say=self.said.append, clock=lambda: self.now)

    def started(self, code: str, name: str = "cpu") -> SupervisedProcess:
        """A process that has come as far as its first line."""
        process = self.supervise(self.program(code, name))
        process.step()
        while "here" not in process.program.log.read_text():
            assert process.descriptor is not None
            assert not select.select([process.descriptor], [], [], 0.02)[0], process.program.log.read_text()
        return process

    def wait_for_marked(self, count: int) -> list[int]:
        deadline = time.monotonic() + 30
        while len(found := marked(self.home.root)) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def let_die(self, process: SupervisedProcess) -> None:
        assert process.descriptor is not None
        assert select.select([process.descriptor], [], [], 30)[0]
        process.step()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    end_strays(made.home, say=made.said.append, hurry=lambda: True)


def test_back_off() -> None:
    assert [POLICY.delay(deaths) for deaths in range(1, 5)] == [1.0, 2.0, 4.0, None]
    assert RestartPolicy(most_delay=3.0).delay(5) == 3.0


def test_killed_and_started_again(bench: Bench) -> None:
    process = bench.started(STAYS)
    first = process.status
    assert first.state == "STARTING" and first.pid is not None and first.restarts == 0
    process.note_ready()
    assert process.state == "READY"
    process.signal(signal.SIGKILL)
    bench.let_die(process)
    assert process.state == "WAITING" and process.wakes_at == 101.0
    assert bench.said == [f"cpu: was killed by SIGKILL; started again in 1 s (log: {process.program.log})"]
    process.step()
    assert not process.is_alive, "it is not time yet"
    bench.now = 101.0
    process.step()
    assert process.status.state == "STARTING" and process.status.restarts == 1
    assert process.status.pid not in (None, first.pid)


def test_given_up_when_it_keeps_dying(bench: Bench) -> None:
    process = bench.supervise(bench.program("raise SystemExit('no such luck')"))
    for _ in range(POLICY.limit + 1):
        process.step()
        bench.let_die(process)
        bench.now += 10.0
    assert process.state == "GAVE_UP" and process.wakes_at is None
    assert "ended with exit status 1 (4 times in a row)" in process.problem
    assert process.problem.endswith("\n  no such luck") and str(process.program.log) in process.problem
    process.step()
    assert not process.is_alive
    process.try_again()
    process.step()
    assert process.is_alive


def test_a_long_life_ends_a_row_of_deaths(bench: Bench) -> None:
    process = bench.supervise(bench.program(STAYS))
    for _ in range(POLICY.limit + 3):
        process.step()
        process.note_ready()
        bench.now += POLICY.healthy_seconds
        process.signal(signal.SIGKILL)
        bench.let_die(process)
        assert process.wakes_at == bench.now + POLICY.first_delay
        bench.now += POLICY.first_delay


@pytest.mark.parametrize("status", [2, 3])
def test_what_it_refuses_is_not_asked_of_it_again(bench: Bench, status: int) -> None:
    process = bench.supervise(bench.program(f"print('error: no such model'); raise SystemExit({status})"))
    process.step()
    bench.let_die(process)
    assert process.state == "GAVE_UP" and "error: no such model" in process.problem


def test_one_that_cannot_be_started_is_tried_again(bench: Bench) -> None:
    program = bench.program(STAYS)
    process = bench.supervise(Program(**vars(program) | {"argv": ("/no/such/interpreter",)}))
    process.step()
    assert process.state == "WAITING" and "cannot be started" in process.problem
    assert not is_held(program.lock)


def test_adopted_when_it_is_what_is_wanted(bench: Bench) -> None:
    before = bench.started(STAYS)
    after = bench.supervise(bench.program(STAYS))
    assert after.adopt()
    assert after.status.pid == before.status.pid and after.status.restarts == 0
    after.signal(signal.SIGKILL)
    bench.let_die(after)
    assert after.state == "WAITING" and "cpu: has ended" in bench.said[-1], "its status is its parent's to know"


def test_not_adopted_with_other_settings_or_when_gone(bench: Bench) -> None:
    process = bench.started(STAYS)
    assert not bench.supervise(bench.program(IGNORES)).adopt()
    process.signal(signal.SIGKILL)
    bench.let_die(process)
    assert not bench.supervise(bench.program(STAYS)).adopt()


def test_nothing_is_started_beside_one_that_is_alive(bench: Bench) -> None:
    bench.started(STAYS)
    second = bench.supervise(bench.program(STAYS))
    second.step()
    assert not second.is_alive and "holds its lock" in second.problem


def test_a_lock_outlives_who_took_it_and_no_descendant_has_it(bench: Bench) -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STAYS!r}]); " + STAYS
    process = bench.started(code)
    pid = process.status.pid
    assert pid is not None and holders(process.program.lock) == [pid]
    assert len(bench.wait_for_marked(2)) == 2
    process.signal(signal.SIGKILL)
    bench.let_die(process)
    assert not is_held(process.program.lock)
    (stray,) = marked(bench.home.root)
    assert end_strays(bench.home, say=bench.said.append, hurry=lambda: False)
    assert f"process {stray}: left behind" in bench.said


def test_ended_in_order(bench: Bench) -> None:
    processes = [bench.started(STAYS, name) for name in ("control-api", "target", "cpu")]
    end_in_order(processes, say=bench.said.append, hurry=lambda: False)
    assert bench.said == ["cpu: stops", "target: stops", "control-api: stops"]
    assert not marked(bench.home.root)


def test_one_that_does_not_listen_is_killed_in_a_hurry(bench: Bench) -> None:
    process = bench.started(IGNORES)
    end_in_order([process], say=bench.said.append, hurry=lambda: True)
    assert bench.said == ["cpu: stops", "cpu: killed"] and not process.is_alive


def test_retired(bench: Bench) -> None:
    process = bench.started(IGNORES)
    process.retire(5.0)
    process.step()
    assert process.state == "STOPPING" and process.is_alive
    bench.now += 5.0
    process.step()
    handle = process.descriptor
    assert handle is None or select.select([handle], [], [], 30)[0]
    process.step()
    assert not process.is_alive and bench.said[-1] == "cpu: killed, it did not end in time"


def test_leftovers_are_found_by_their_locks(bench: Bench) -> None:
    process = bench.started(STAYS, "target")
    bench.home.locks.joinpath("cpu.lock").touch()
    (found,) = found_alive(bench.home, bench.said.append)
    assert found.name == "target"
    found.signal(signal.SIGTERM)
    assert found.ended(30.0)
    bench.let_die(process)


def test_a_leftover_that_is_gone_needs_no_signal(bench: Bench) -> None:
    process = bench.started(STAYS)
    assert process.status.pid is not None
    leftover = Leftover("cpu", [Handle(process.status.pid)])
    os.kill(process.status.pid, signal.SIGKILL)
    bench.let_die(process)
    leftover.signal(signal.SIGTERM)
    assert leftover.ended(0.0)
