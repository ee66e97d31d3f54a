"""`slipstream target`: what a control API knows of targets, and an operator's word to one that answers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.admin_target import admin_target
from tests.fakes.control_plane import Desk
from tests.fakes.ledger_desk import LedgerDesk
from tests.unit.cli.conftest import Command


@pytest.fixture
def ledger(tmp_path: Path, desk: Desk) -> Iterator[LedgerDesk]:
    """Of the target `local`, on which `demo` is RUNNING."""
    ledger = LedgerDesk(tmp_path / "ledger.sqlite")
    with admin_target(ledger) as address:
        desk.post("/v1/targets", {"name": "local", "address": address}, status=201)
        desk.running()
        ledger.open("demo")
        yield ledger
    ledger.close()


def test_a_run_gets_no_packs_and_gets_them_again(ledger: LedgerDesk, desk: Desk, slipstream: Command) -> None:
    held = slipstream("target", "pause", "local", "demo")
    assert (held.status, held.out) == (0, "local gives demo no packs from now on\n")
    assert held.err == "next: slipstream target resume local demo\n"
    desk.reconcile()
    assert "PACKS_HELD_BACK: local holds its packs back." in slipstream("run", "get", "demo").out
    assert "PACKS_HELD_BACK" in slipstream("run", "ls").out
    again = slipstream("target", "resume", "local", "demo", "-o", "json")
    assert json.loads(again.out)["packs_held_back"] is False and again.err == ""
    assert not ledger.book.subscriptions["subscriptions/demo"].record.paused


def test_a_target_is_drained(ledger: LedgerDesk, slipstream: Command) -> None:
    drained = slipstream("target", "drain", "local")
    assert drained.status == 0 and drained.out.startswith("local finishes what is leased; runs go on where they were")
    assert ledger.book.draining
    assert "DRAINING" in slipstream("target", "get", "local").out


def test_what_is_refused(ledger: LedgerDesk, desk: Desk, slipstream: Command) -> None:
    unknown = slipstream("target", "pause", "locl", "demo")
    assert (unknown.status, unknown.err.splitlines()[1]) == (
        13,
        "  remedy: Did you mean local? `slipstream target ls` lists the targets.",
    )
    other = slipstream("target", "pause", "local", "demoo")
    assert other.status == 13 and "Did you mean demo?" in other.err
    desk.post("/v1/targets", {"name": "away", "address": "127.0.0.1:1"}, status=201)
    away = slipstream("target", "drain", "away")
    assert away.status == 15 and "does not answer: whether the order was carried out is not known." in away.err
