"""The database file: opened or refused in words, and the two kinds of transactions."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from control_api.store.migrations import migrate
from control_api.store.tables import SCHEMA_VERSION
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

DEFAULT_URL = "sqlite:///slipstream.sqlite"

_BUSY_SECONDS = 5.0
_TOUCHED = "touched_runs"

Listener = Callable[[frozenset[int]], None]
"""Told after a commit: the ids of the runs that it changed."""


class Database:
    """A SQLite file in WAL mode. Threads may share it; every transaction has its own session."""

    def __init__(self, url: str = DEFAULT_URL, *, busy_seconds: float = _BUSY_SECONDS) -> None:
        """Open the file, make it and its tables if they are missing.

        Args:
            url: `sqlite:///FILE` (relative) or `sqlite:////FILE` (absolute).
            busy_seconds: how long a transaction waits for another process that writes.

        Raises:
            SlipstreamError: SPEC_INVALID for another kind of URL; DATABASE_NEWER, DATABASE_INVALID, DATABASE_LOCKED
                or DATABASE_READ_ONLY.
        """
        self.path = _path_of(url)
        self._engine = _engine(self.path, busy_seconds)
        self._listeners: list[Listener] = []
        # SQLite's own lock is polled for; the threads of this process queue instead.
        self._one_writer = threading.Lock()
        try:
            with database_errors_in_words(str(self.path)):
                self._prepare()
        except SlipstreamError:
            self._engine.dispose()
            raise

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` after every commit that changed something, in the thread that committed."""
        self._listeners.append(listener)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent view; what it changes is not kept."""
        with database_errors_in_words(str(self.path)), Session(self._engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that holds the only right to write from its start; committed when the block is left in order.

        Raises:
            SlipstreamError: DATABASE_LOCKED, DATABASE_READ_ONLY, DISK_FULL.
        """
        engine = self._engine.execution_options(immediate=True)
        with (
            self._one_writer,
            database_errors_in_words(str(self.path)),
            Session(engine, expire_on_commit=False) as session,
        ):
            session.connection()  # take the lock now: what is read below is still true when it is written
            yield session
            session.commit()
            touched = frozenset(session.info.get(_TOUCHED, ()))
        if touched:
            for listener in self._listeners:
                listener(touched)

    def close(self) -> None:
        """Idempotent."""
        self._engine.dispose()

    def _prepare(self) -> None:
        with self._engine.execution_options(immediate=True).begin() as connection:
            version = int(connection.execute(text("PRAGMA user_version")).scalar_one())
            names = set(inspect(connection).get_table_names())
            if version > SCHEMA_VERSION:
                raise SlipstreamError(
                    f"{self.path} has schema version {version}; this version of Slipstream knows {SCHEMA_VERSION}.",
                    reason=Reason.DATABASE_NEWER,
                    remedy="Start the newer Slipstream that wrote it, or give another file with --database.",
                )
            if version == 0 and names:
                raise SlipstreamError(
                    f"{self.path} holds tables of another program ({', '.join(sorted(names)[:3])}).",
                    reason=Reason.DATABASE_INVALID,
                    remedy="Give another file with --database.",
                )
            migrate(connection, version)
            # Written even when nothing changed: a file that cannot be written must be found out now.
            connection.execute(text(f"PRAGMA user_version = {SCHEMA_VERSION}"))


def touch(session: Session, run_id: int) -> None:
    """Say that this transaction changes the run: those who watch it are told after the commit."""
    session.info.setdefault(_TOUCHED, set()).add(run_id)


def _path_of(url: str) -> Path:
    # Not parsed as a URL: what follows is a path to the letter, with every ? # and % of it.
    scheme, _, file = url.partition(":///")
    if scheme != "sqlite" or file in ("", ":memory:"):
        raise SlipstreamError(
            f"--database is {url!r}, expected sqlite:///FILE.",
            reason=Reason.SPEC_INVALID,
            remedy="Example: --database sqlite:///slipstream.sqlite (four slashes start an absolute path).",
        )
    return Path(file)


def _engine(path: Path, busy_seconds: float) -> Engine:
    engine = create_engine(
        URL.create("sqlite", database=str(path)), connect_args={"timeout": busy_seconds}, pool_size=20, max_overflow=20
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # the driver begins nothing on its own
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # an answer of 201 survives a power cut

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        immediate = connection.get_execution_options().get("immediate")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


@contextmanager
def database_errors_in_words(path: str) -> Iterator[None]:
    """Turn what SQLite refuses into a SlipstreamError; anything else is a defect and passes."""
    try:
        yield
    except DBAPIError as error:
        refusal = _refusal(error.orig, path)
        if refusal is None:
            raise
        raise refusal from error


def _refusal(error: Any, path: str) -> SlipstreamError | None:
    # The low byte of SQLite's extended codes is the primary one.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    known = {
        sqlite3.SQLITE_BUSY: (
            Reason.DATABASE_LOCKED,
            "is locked by another process",
            "Stop the other program that writes it (a second control-api, a database browser).",
        ),
        sqlite3.SQLITE_LOCKED: (Reason.DATABASE_LOCKED, "is locked", "Try again."),
        sqlite3.SQLITE_READONLY: (
            Reason.DATABASE_READ_ONLY,
            "cannot be written",
            "Make the file and its directory writable for this user, or give another file with --database.",
        ),
        sqlite3.SQLITE_CANTOPEN: (
            Reason.DATABASE_READ_ONLY,
            "cannot be opened",
            "The directory must exist and be writable for this user.",
        ),
        sqlite3.SQLITE_FULL: (Reason.DISK_FULL, "could not be written: the disk is full", "Free some space."),
        sqlite3.SQLITE_NOTADB: (Reason.DATABASE_INVALID, "is no database", "Give another file with --database."),
        sqlite3.SQLITE_CORRUPT: (Reason.DATABASE_INVALID, "is damaged", "Restore it, or give another file."),
    }
    if code not in known:
        return None
    reason, what, remedy = known[code]
    return SlipstreamError(f"The database {path} {what}.", reason=reason, remedy=remedy)
