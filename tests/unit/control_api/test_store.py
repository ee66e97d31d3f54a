"""The database file: refused in words, closed to other programs, safe to leave at any time."""

import os
import sqlite3
from pathlib import Path

import pytest

from control_api.store import events, runs, targets
from control_api.store.database import Database
from control_api.store.tables import SCHEMA_VERSION
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from tests.fakes.control_plane import SPEC


def refusal(url: str) -> SlipstreamError:
    """Why the database cannot be opened."""
    with pytest.raises(SlipstreamError) as refused:
        Database(url, busy_seconds=0.1)
    return refused.value


def test_what_was_written_is_there_after_a_kill(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.sqlite"
    with Database(url).write() as session:  # never closed
        targets.add(session, name="local", address="127.0.0.1:1", now=1.0)
    again = Database(url)
    with again.read() as session:
        found = targets.find(session, "local")
        assert found is not None
        assert found.address == "127.0.0.1:1"
    again.close()


def test_a_refused_transaction_leaves_nothing(database: Database) -> None:
    told: list[frozenset[int]] = []
    database.add_listener(told.append)
    with pytest.raises(ZeroDivisionError), database.write() as session:
        target = targets.add(session, name="local", address="127.0.0.1:1", now=1.0)
        runs.create(session, spec=SPEC, target=target, note="", now=1.0)
        raise ZeroDivisionError
    with database.read() as session:
        assert targets.find(session, "local") is None
    assert told == []


def test_watchers_are_told_after_the_commit(database: Database) -> None:
    told: list[frozenset[int]] = []

    def listen(changed: frozenset[int]) -> None:
        with database.read() as session:
            assert runs.find(session, "demo") is not None, "told before others could see it"
        told.append(changed)

    database.add_listener(listen)
    with database.write() as session:
        target = targets.add(session, name="local", address="127.0.0.1:1", now=1.0)
        run = runs.create(session, spec=SPEC, target=target, note="", now=1.0)
    assert told == [frozenset({run.id})]


def test_event_ids_are_never_used_again(database: Database) -> None:
    with database.write() as session:
        target = targets.add(session, name="local", address="127.0.0.1:1", now=1.0)
        first = runs.create(session, spec=SPEC, target=target, note="", now=1.0)
        events.append(session, first.id, events.NewEvent("ANY"), now=1.0)
        last = events.newest_id(session, first.id)
        session.expunge(first)
        runs.delete(session, first)
        second = runs.create(session, spec=SPEC, target=target, note="", now=2.0)
        assert second.id > first.id
        assert min(one.id for one in events.page(session, second.id, after=0, size=10)) > last


def test_newer_schema(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.sqlite"
    Database(url).close()
    with sqlite3.connect(tmp_path / "a.sqlite") as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    error = refusal(url)
    assert error.reason is Reason.DATABASE_NEWER
    assert f"schema version {SCHEMA_VERSION + 1}" in error.message
    assert error.exit_code == 4


def test_another_programs_database(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.sqlite") as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    error = refusal(f"sqlite:///{tmp_path}/a.sqlite")
    assert error.reason is Reason.DATABASE_INVALID
    assert "bookmarks" in error.message


def test_no_database_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_text("dear diary, " * 1000)
    assert refusal(f"sqlite:///{tmp_path}/a.sqlite").reason is Reason.DATABASE_INVALID


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    error = refusal(f"sqlite:///{tmp_path}/none/a.sqlite")
    assert error.reason is Reason.DATABASE_READ_ONLY
    assert "directory must exist" in error.remedy


def test_locked_at_the_start(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.sqlite"
    holder = Database(url)
    with holder.write():
        error = refusal(url)
    holder.close()
    assert error.reason is Reason.DATABASE_LOCKED


def test_read_only(tmp_path: Path) -> None:
    """A file that SQLite itself opens read-only: permissions do not bind every user that runs tests."""
    path = tmp_path / "a.sqlite"
    Database(f"sqlite:///{path}").close()
    if os.geteuid() == 0:
        error = refusal(f"sqlite:///file:{path}?mode=ro&uri=true")
    else:
        path.chmod(0o444)
        error = refusal(f"sqlite:///{path}")
    assert error.reason is Reason.DATABASE_READ_ONLY


@pytest.mark.parametrize("name", ["a b.sqlite", "50%20.sqlite", "a?b=c.sqlite", "a#b.sqlite", "ä@:x.sqlite"])
def test_a_path_is_taken_to_the_letter(tmp_path: Path, name: str) -> None:
    Database(f"sqlite:///{tmp_path}/{name}").close()
    assert [one.name for one in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("url", ["", "a.sqlite", "sqlite://", "sqlite:///:memory:", "postgresql://h/d", "nonsense://x"])
def test_other_urls(url: str) -> None:
    error = refusal(url)
    assert error.reason is Reason.SPEC_INVALID
    assert "sqlite:///FILE" in error.message
