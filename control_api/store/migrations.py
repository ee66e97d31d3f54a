"""From the schema of an older version to this one's, in place; what was stored stays."""

from collections.abc import Mapping

from sqlalchemy import Connection, text

from control_api.store.tables import SCHEMA_VERSION, Table

_STATEMENTS: Mapping[int, tuple[str, ...]] = {
    2: ("ALTER TABLE assignments ADD COLUMN next_log_line INTEGER NOT NULL DEFAULT 0",),
    3: ("ALTER TABLE trainers ADD COLUMN forgotten BOOLEAN NOT NULL DEFAULT 0",),
    4: (
        "ALTER TABLE runs ADD COLUMN stream_stats JSON",
        "INSERT INTO subscriptions (target_id, run_id, name) "
        "SELECT target_id, id, 'subscriptions/' || directory FROM runs",
    ),
    5: ("ALTER TABLE runs ADD COLUMN uid TEXT",),
    6: (
        "ALTER TABLE runs ADD COLUMN heldout JSON",
        "ALTER TABLE runs ADD COLUMN transport TEXT",
        "ALTER TABLE checkpoints ADD COLUMN heldout JSON",
        "ALTER TABLE checkpoints ADD COLUMN is_best BOOLEAN NOT NULL DEFAULT 0",
    ),
    7: ("ALTER TABLE runs ADD COLUMN data JSON",),
    8: ("ALTER TABLE targets ADD COLUMN sizes JSON",),
}
"""What each version changed on tables that were there before; tables that are missing are made first."""


def migrate(connection: Connection, version: int) -> None:
    """Bring a database of schema `version` (0: empty) up to date, inside the caller's transaction."""
    Table.metadata.create_all(connection)
    for newer in range(version + 1, SCHEMA_VERSION + 1) if version else ():
        for statement in _STATEMENTS[newer]:
            connection.execute(text(statement))
