"""Whatever dies, and when: along the lineage of every run each pack counts once, in order; the ledger proves it.

    SLIPSTREAM_LINEAGE_PACKS=1000 pytest tests/system/test_stream_lineage.py

is the same at full length; SLIPSTREAM_LINEAGE_SEED draws other deaths.
"""

import os
import sqlite3
import sys
from collections import Counter
from pathlib import Path

import pytest

from target_server.lineage import lineage_report
from tests.fakes.mortal_trainers import (
    ACKNOWLEDGED,
    CHECKPOINT,
    HAPPENED,
    Learned,
    RunPlan,
    plan_runs,
    read_checkpoint,
)
from tests.fakes.processes import Processes

PACKS = int(os.environ.get("SLIPSTREAM_LINEAGE_PACKS", "150"))
SEED = int(os.environ.get("SLIPSTREAM_LINEAGE_SEED", "20"))
SERVER_KILLS = 2


def arguments(recipe: Path, ledger: Path) -> list[str | Path]:
    # A shelf of a few packs: runs that drift apart have theirs computed again.
    return [recipe, "--ledger", ledger, "--probe-bytes", "1MiB", "--shelf-bytes", "1MiB", "--threads", "1"]


def run_to_the_end(processes: Processes, recipe: Path, directory: Path) -> Path:
    """Four trainers, two runs, one server, all of them killed again and again; returns the ledger."""
    ledger = directory / "ledger.sqlite"
    server, address = processes.start_target_server(*arguments(recipe, ledger))
    trainers = processes.start(
        *("tests.fakes.mortal_trainers", "--target", address, "--recipe", recipe, "--directory", directory),
        *("--ledger", ledger, "--seed", str(SEED), "--packs", str(PACKS)),
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    seen = 0
    for _ in range(SERVER_KILLS):
        trainers.wait_for_line(r"^pairs: server at step", start=seen, timeout=150)
        seen = max(number for number, line in enumerate(trainers.lines) if line.startswith("pairs: server")) + 1
        assert server.wait_exit(timeout=30) == -9
        server, again = processes.start_target_server(
            *arguments(recipe, ledger), port=int(address.rpartition(":")[2]), timeout=90
        )
        assert again == address
    assert trainers.wait_exit(timeout=max(120, PACKS)) == 0, trainers.output
    return ledger


def assert_learned_once_and_in_order(plan: RunPlan, learned: Learned) -> None:
    """What the weights would be made of."""
    assert [step for step, _ in learned.steps] == list(range(plan.steps))
    counted = [number for _, packs in learned.steps for number in packs]
    assert counted == list(range(plan.steps * plan.packs_per_step))


def assert_ledger_agrees(ledger: Path, plan: RunPlan, acknowledged: list[list[int]]) -> None:
    """The server's own account: the same packs once each, and nothing forgotten that it had acknowledged."""
    report = lineage_report(ledger, plan.name)
    assert report.exactly_once, report
    assert (report.first_sequence_number, report.next_sequence_number) == (0, plan.steps * plan.packs_per_step)
    assert (report.steps_committed, report.quarantined) == (plan.steps, ())
    with sqlite3.connect(ledger) as connection:
        query = "SELECT incarnation, step FROM commits WHERE subscription = ?"
        commits = connection.execute(query, (f"subscriptions/{plan.name}",)).fetchall()
    newest: dict[int, int] = {}
    for incarnation, step in sorted(commits):
        newest[step] = incarnation
    for incarnation, step in acknowledged:
        # A commit across a restart of the server counts for the incarnation before the restart.
        assert any(each == step and number <= incarnation for number, each in commits), (incarnation, step)
    in_order = [newest[step] for step in range(plan.steps)]
    assert in_order == sorted(in_order), "a step before another one counts for a later incarnation"
    assert report.steps_discarded == len(commits) - plan.steps


@pytest.mark.timeout(240 + PACKS)
def test_every_pack_counts_once_whoever_is_killed(processes: Processes, tiny_recipe: Path, tmp_path: Path) -> None:
    print(f"seed {SEED}, {PACKS} packs")  # noqa: T201 - shown when the test fails
    plans = plan_runs(SEED, PACKS)
    ledger = run_to_the_end(processes, tiny_recipe, tmp_path)
    learned = {plan.name: read_checkpoint(tmp_path / plan.name / CHECKPOINT) for plan in plans}
    for plan in plans:
        directory = tmp_path / plan.name
        happened = [line.partition(" at ")[0] for line in (directory / HAPPENED).read_text().splitlines()]
        assert happened == [fate.what for fate in plan.fates]
        print(plan.name, Counter(happened))  # noqa: T201
        assert_learned_once_and_in_order(plan, learned[plan.name])
        lines = (directory / ACKNOWLEDGED).read_text().splitlines()
        assert_ledger_agrees(ledger, plan, [[int(word) for word in line.split()] for line in lines])
    bytes_of = [{n: crc for _, packs in each.steps for n, crc in packs.items()} for each in learned.values()]
    assert bytes_of[0] == bytes_of[1], "runs of one stream, and a pack computed again, have the same bytes"
