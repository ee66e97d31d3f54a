"""A database of an older version is brought up to date when it is opened, and keeps what it holds."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from control_api.store import runs, trainers
from control_api.store.database import Database
from control_api.store.tables import SCHEMA_VERSION

SCHEMAS = Path(__file__).parent / "schemas"

CONTENT = """
INSERT INTO targets (id, name, address, created_at, status, detail)
    VALUES (1, 'local', '127.0.0.1:1', 1.0, 'REACHABLE', '');
INSERT INTO runs (id, name, directory, target_id, spec, note, state, desired_state, message, conditions, ended_early,
    steps, created_at, updated_at)
    VALUES (7, 'demo', 'demo.2', 1, '{}', '', 'RUNNING', 'RUNNING', '', '[]', 0, 3, 1.0, 1.0);
INSERT INTO trainers (id, name, instance_id, protocol_version, host, storage, devices, versions, leaving,
    registered_at, last_seen_at) VALUES (1, 't1', 'i', 1, 'box', 'disk', '[]', '{}', 0, 1.0, 1.0);
INSERT INTO assignments (id, run_id, trainer_id, attempt, created_at, detach, target_unreachable, restarting)
    VALUES (5, 7, 1, 1, 1.0, 0, 0, 0);
"""
SINCE_VERSION_4 = "INSERT INTO subscriptions (target_id, run_id, name) VALUES (1, 7, 'subscriptions/demo.2');"


def shape(path: Path) -> dict[str, set[Any]]:
    """Columns, keys and indices of every table."""
    with closing(sqlite3.connect(path)) as connection:
        found: dict[str, set[Any]] = {}
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = {row[1:] for row in connection.execute(f"PRAGMA table_info({table})")}
            keys = {row[2:] for row in connection.execute(f"PRAGMA foreign_key_list({table})")}
            indices = {row[1:] for row in connection.execute(f"PRAGMA index_list({table})")}
            found[table] = columns | keys | indices
        return found


def test_there_is_a_schema_of_every_older_version() -> None:
    assert {one.stem for one in SCHEMAS.iterdir()} == {f"version_{number}" for number in range(1, SCHEMA_VERSION)}


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION))
def test_from_an_older_version(tmp_path: Path, version: int) -> None:
    path = tmp_path / "old.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((SCHEMAS / f"version_{version}.sql").read_text() + CONTENT)
        connection.executescript(SINCE_VERSION_4 if version >= 4 else "")
        connection.execute(f"PRAGMA user_version = {version}")
    for _ in range(2):  # the second time there is nothing to do
        database = Database(f"sqlite:///{path}")
        with database.read() as session:
            run = runs.find(session, "demo")
            assert run is not None
            [assignment] = trainers.open_assignments(session, run)
            assert (run.steps, assignment.id, assignment.next_log_line) == (3, 5, 0)
            rows = session.execute(text("SELECT target_id, run_id, name FROM subscriptions")).all()
            assert [tuple(row) for row in rows] == [(1, 7, "subscriptions/demo.2")]
        database.close()
    Database(f"sqlite:///{tmp_path}/new.sqlite").close()
    assert shape(path) == shape(tmp_path / "new.sqlite")
