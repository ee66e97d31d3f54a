"""`target-server lineage`: the proof in words and as JSON, and its exit status."""

import json
import sqlite3
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from target_server.cli import run_command
from target_server.lineage_command import ranges_of
from tests.fakes.ledger_desk import LedgerDesk


def train(desk: LedgerDesk, name: str, incarnation: int, steps: range) -> None:
    for step in steps:
        assert desk.get(name, incarnation)
        desk.ledger.commit(name, incarnation, step)


@pytest.fixture
def trained(desk: LedgerDesk) -> LedgerDesk:
    """Run a resumed once from step 2 and left a pack out; run b is one step old."""
    name, incarnation = desk.join("a")
    train(desk, name, incarnation, range(4))
    train(desk, name, desk.seek(name, 2, quarantined=frozenset({4})), range(2, 4))
    desk.ledger.commit(name, 2, 4)
    train(desk, *desk.join("b"), range(1))
    return desk


def test_the_proof_of_every_run(trained: LedgerDesk, capsys: pytest.CaptureFixture[str]) -> None:
    """While the server has the file open."""
    assert run_command(["lineage", str(trained.store.path)]) == 0
    assert capsys.readouterr().out == (
        "a: 2 incarnations, 5 steps on the lineage, 2 discarded\n"
        "  packs 0 to 4: 4 counted\n"
        "  quarantined 1: 4\n"
        "  every pack counts exactly once\n"
        "b: 1 incarnation, 1 step on the lineage, 0 discarded\n"
        "  packs 0 to 0: 1 counted\n"
        "  every pack counts exactly once\n"
    )
    assert run_command(["lineage", str(trained.store.path), "b", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["exactly_once"] and [run["run"] for run in answer["runs"]] == ["b"]
    assert answer["runs"][0]["packs_counted"] == 1


@pytest.mark.parametrize(
    ("damage", "words", "missing", "repeated"),
    [
        ("DELETE FROM commits WHERE step = 1", "MISSING 1: 1", [1], []),
        ("DELETE FROM commits WHERE incarnation = 2", "packs 0 to 3: 4 counted", [], []),
        ("UPDATE commits SET first_sequence_number = 2 WHERE step = 3", "COUNTED MORE THAN ONCE 1: 2", [], [2]),
        ("INSERT INTO incarnations VALUES ('subscriptions/a', 3, 0, 7, 1)", "packs 0 to 4: 4 counted", [], []),
        ("INSERT INTO commits VALUES ('subscriptions/a', 3, 8, 8, 8, '[]')", "MISSING 3: 5-7", [5, 6, 7], []),
    ],
)
def test_a_ledger_that_proves_nothing(
    trained: LedgerDesk,
    capsys: pytest.CaptureFixture[str],
    damage: str,
    words: str,
    missing: list[int],
    repeated: list[int],
) -> None:
    with sqlite3.connect(trained.store.path) as connection:
        connection.execute(damage)
    connection.close()
    status = 1 if missing or repeated else 0
    assert run_command(["lineage", str(trained.store.path)]) == status
    out = capsys.readouterr().out
    assert words in out and ("PROOF FAILED" in out) == bool(status)
    assert run_command(["lineage", str(trained.store.path), "a", "--json"]) == status
    (report,) = json.loads(capsys.readouterr().out)["runs"]
    assert (report["missing"], report["repeated"], report["exactly_once"]) == (missing, repeated, not status)


def test_a_rollback_behind_where_the_ledger_begins(desk: LedgerDesk) -> None:
    """The ledger was lost at step 10; then an older checkpoint was taken after all."""
    name, incarnation = desk.join("a", next_step=10)
    train(desk, name, incarnation, range(10, 12))
    train(desk, name, desk.seek(name, 5), range(5, 7))
    assert run_command(["lineage", str(desk.store.path), "a"]) == 0


def test_nothing_to_prove(desk: LedgerDesk, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["lineage", str(desk.store.path)]) == 0
    assert "No run has trained" in capsys.readouterr().out
    desk.join("a")
    assert run_command(["lineage", str(desk.store.path)]) == 0
    assert "No run has trained" in capsys.readouterr().out, "held-out answers are read, and nothing is trained"
    assert run_command(["lineage", str(desk.store.path), "a"]) == 0
    assert "no step is committed yet" in capsys.readouterr().out


def test_bad_input_is_no_broken_promise(desk: LedgerDesk, tmp_path: Path) -> None:
    desk.join("a")
    sqlite3.connect(tmp_path / "other.sqlite").execute("CREATE TABLE t (x)")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no database at all")
    for arguments, words in (
        ((desk.store.path, "nobody"), "no incarnation of a run 'nobody'. .*server: none."),
        ((tmp_path / "none.sqlite",), "There is no ledger .*none.sqlite. Name the file"),
        ((tmp_path,), "There is no ledger"),
        ((tmp_path / "other.sqlite",), "is a database, but not a ledger"),
        ((tmp_path / "empty",), "not a ledger"),
        ((tmp_path / "text",), "file is not a database"),
    ):
        with pytest.raises(SlipstreamError, match=words) as refused:
            run_command(["lineage", *map(str, arguments)])
        assert refused.value.exit_code == 2 and refused.value.remedy


def test_ranges() -> None:
    assert ranges_of([3, 7, 8, 9]) == "3, 7-9"
    assert ranges_of(range(0, 100, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 42 more"
