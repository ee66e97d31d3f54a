"""⑥ What of the lease ledger must survive a crash: a small SQLite file. Leases are not in it; they live in memory.

    subscriptions   one row a run: its terms, cursor and state
    incarnations    one row a seek: where that incarnation of the run began
    commits         one row a committed step of an incarnation

`incarnations` and `commits` prove that every pack counts exactly once: see lineage.py.
"""

import contextlib
import fcntl
import json
import logging
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from target_server.subscription import SkippedSteps, Start, SubscriptionRecord, SubscriptionTerms

SCHEMA_VERSION = 1
_APPLICATION_ID = 0x534C4950  # "SLIP": tells our file from any other SQLite file

_SCHEMA = """
CREATE TABLE subscriptions (
    name TEXT PRIMARY KEY,
    terms TEXT NOT NULL,
    stream TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    first_sequence_number INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    seek_request_id TEXT NOT NULL,
    next_step INTEGER NOT NULL,
    quarantined TEXT NOT NULL,
    paused INTEGER NOT NULL,
    closed INTEGER NOT NULL,
    started INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE incarnations (
    subscription TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    next_step INTEGER NOT NULL,
    first_sequence_number INTEGER NOT NULL,
    packs_per_step INTEGER NOT NULL,
    PRIMARY KEY (subscription, incarnation)
) STRICT, WITHOUT ROWID;
CREATE TABLE commits (
    subscription TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    step INTEGER NOT NULL,
    first_sequence_number INTEGER NOT NULL,
    last_sequence_number INTEGER NOT NULL,
    quarantined TEXT NOT NULL,
    PRIMARY KEY (subscription, incarnation, step)
) STRICT, WITHOUT ROWID;
"""

_COMMIT = "INSERT OR IGNORE INTO commits VALUES (?, ?, ?, ?, ?, ?)"

_SECONDS_TO_OPEN = 5.0
"""For which another program may hold a lock on the file while the server starts."""
_PASSING = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR")
"""How the names of errors begin that somebody can mend while the server runs; a quota that is used up is an IOERR."""

_Done = Literal["read", "written"]

_log = logging.getLogger(__name__)


class LedgerStore:
    """The open file. Used under the ledger's lock only, so it never waits: for another program's lock, or for room on
    the disk, the caller of the call that had to write waits, and comes again. Calls that write nothing go on.

    What was written survives the death of the process. Subscriptions and seeks also survive a power cut; of the commits
    since the last of those, a power cut may take the newest, which the next seek of their run makes good.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            SlipstreamError: ENVIRONMENT_UNSUPPORTED when the file is in use, not a ledger, newer than this version, or
                not writable; DISK_FULL.
        """
        self.path = path
        self._refused: dict[_Done, set[str]] = {"read": set(), "written": set()}
        """Subscriptions that something could not be read or written for, since that last worked for any."""
        with _in_words(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _lock(path)
            try:
                self._connection = self._open()
            except BaseException:
                os.close(self._lock_fd)
                raise

    def _open(self) -> sqlite3.Connection:
        # One connection for all threads: the ledger's lock keeps them apart.
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=_SECONDS_TO_OPEN)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            # A full sync costs a trainer milliseconds in every step, and all runs wait for it in turn.
            connection.execute("PRAGMA synchronous = NORMAL")
            check_schema(connection, self.path, create=True)
            connection.execute("PRAGMA busy_timeout = 0")
        except BaseException:
            connection.close()
            raise
        return connection

    def subscriptions(self) -> list[SubscriptionRecord]:
        """All that are not closed."""
        return self._select("WHERE closed = 0 ORDER BY name")

    def find(self, name: str) -> SubscriptionRecord | None:
        """One that was saved, closed or not.

        Raises:
            SlipstreamError: LEDGER_UNWRITABLE: not now.
        """
        with self._told("read", name):
            return next(iter(self._select("WHERE name = ?", name)), None)

    def save(self, record: SubscriptionRecord) -> None:
        """Write the record as it is now.

        Raises:
            SlipstreamError: LEDGER_UNWRITABLE: not now, for want of room or because another program holds a lock.
        """
        with self._writing(record.name, synced=True):
            self._save(record)

    def seek(self, record: SubscriptionRecord, before: SubscriptionRecord, skipped: SkippedSteps) -> None:
        """Write the record together with the incarnation it begins: all of it, or nothing.

        Args:
            record: as it is after the seek.
            before: as it was.
            skipped: steps, with their packs, that count as committed by the incarnation before that has trained.

        Raises:
            SlipstreamError: LEDGER_UNWRITABLE.
        """
        row = (
            record.name,
            record.incarnation,
            record.next_step,
            record.first_sequence_number,
            record.terms.packs_per_step,
        )
        with self._writing(record.name, synced=True):
            before = replace(
                before,
                incarnation=self._trained_last(before),
                quarantined=before.quarantined | record.quarantined,  # the cursor knows what its weights lack
            )
            self._connection.executemany(_COMMIT, (_commit_row(before, *each) for each in skipped))
            self._save(record)
            self._connection.execute("INSERT OR REPLACE INTO incarnations VALUES (?, ?, ?, ?, ?)", row)

    def commit(self, record: SubscriptionRecord, step: int, packs: range) -> None:
        """Write that `step` of the present incarnation trained `packs`, except those quarantined. Idempotent.

        Raises:
            SlipstreamError: LEDGER_UNWRITABLE.
        """
        with self._writing(record.name, synced=False):
            self._connection.execute(_COMMIT, _commit_row(record, step, packs))
            self._connection.execute(
                "UPDATE subscriptions SET next_step = max(next_step, ?) WHERE name = ?", (step + 1, record.name)
            )

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._lock_fd >= 0:
            self._connection.close()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _save(self, record: SubscriptionRecord) -> None:
        row = {
            "name": record.name,
            "terms": json.dumps(asdict(record.terms), sort_keys=True),
            "stream": record.stream,
            "fingerprint": record.fingerprint,
            "first_sequence_number": record.first_sequence_number,
            "incarnation": record.incarnation,
            "seek_request_id": record.seek_request_id,
            "next_step": record.next_step,
            "quarantined": json.dumps(sorted(record.quarantined)),
            "paused": record.paused,
            "closed": record.closed,
            "started": record.started,
        }
        names = ", ".join(row)
        values = ", ".join(f":{name}" for name in row)
        self._connection.execute(f"INSERT OR REPLACE INTO subscriptions ({names}) VALUES ({values})", row)

    def _trained_last(self, record: SubscriptionRecord) -> int:
        """The newest incarnation that has committed a step; the present one where that belongs to other packs."""
        query = """
            SELECT incarnation, first_sequence_number, packs_per_step FROM incarnations WHERE subscription = :name
              AND incarnation = (SELECT max(incarnation) FROM commits WHERE subscription = :name)"""
        found = self._connection.execute(query, {"name": record.name}).fetchone()
        grid = (record.first_sequence_number, record.terms.packs_per_step)
        return int(found[0]) if found is not None and found[1:] == grid else record.incarnation

    def _select(self, which: str, *values: str) -> list[SubscriptionRecord]:
        with _in_words(self.path, serving=True):
            cursor = self._connection.execute(f"SELECT * FROM subscriptions {which}", values)
            columns = [column[0] for column in cursor.description]
            return [_record(dict(zip(columns, row, strict=True))) for row in cursor]

    @contextlib.contextmanager
    def _writing(self, name: str, *, synced: bool) -> Iterator[None]:
        """A transaction for a subscription."""
        with self._told("written", name), _in_words(self.path, serving=True), self._transaction(synced=synced):
            yield

    @contextlib.contextmanager
    def _told(self, done: _Done, name: str) -> Iterator[None]:
        """The log says who has to wait and why, once, and when it is over."""
        refused = self._refused[done]
        try:
            yield
        except SlipstreamError as error:
            if error.reason is Reason.LEDGER_UNWRITABLE and name not in refused:
                refused.add(name)
                log_event(
                    _log, "warning", f"ledger_not_{done}", subscription=name, why=error.message, then=error.remedy
                )
            raise
        if refused:
            log_event(_log, "info", f"ledger_{done}_again", refused_meanwhile=sorted(refused))
            refused.clear()

    @contextlib.contextmanager
    def _transaction(self, *, synced: bool) -> Iterator[None]:
        """`synced`: all that was ever written is on the disk afterwards, else in the hands of the operating system."""
        if synced:
            self._connection.execute("PRAGMA synchronous = FULL")
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk has ended it already
                self._connection.execute("ROLLBACK")
            raise
        finally:
            if synced:
                self._connection.execute("PRAGMA synchronous = NORMAL")


def check_schema(connection: sqlite3.Connection, path: Path, *, create: bool) -> None:
    """Make the tables in an empty file; refuse a file that is not a ledger of this version.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED.
    """
    version, application, tables = (
        connection.execute(query).fetchone()[0]
        for query in ("PRAGMA user_version", "PRAGMA application_id", "SELECT count(*) FROM sqlite_schema")
    )
    if create and tables == 0 and version == 0:
        stamp = f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
        connection.executescript(f"BEGIN; {_SCHEMA} {stamp} COMMIT;")
        return
    if application != _APPLICATION_ID:
        raise _unsupported(f"{path} is a database, but not a ledger of a target server.", "Name another with --ledger.")
    if version != SCHEMA_VERSION:
        raise _unsupported(
            f"The ledger {path} has format {version}; this version of Slipstream knows format {SCHEMA_VERSION}.",
            "Run the version that wrote it, or begin a new one with --ledger: trainers resume from their checkpoints.",
        )


def _commit_row(record: SubscriptionRecord, step: int, packs: range) -> tuple[str, int, int, int, int, str]:
    quarantined = json.dumps(sorted(record.quarantined.intersection(packs)))
    return record.name, record.incarnation, step, packs.start, packs.stop - 1, quarantined


def _record(row: dict[str, object]) -> SubscriptionRecord:
    terms = json.loads(str(row.pop("terms")))
    terms["layer_ids"] = tuple(terms["layer_ids"])
    terms["start"] = Start(terms["start"])
    quarantined = set(json.loads(str(row.pop("quarantined"))))
    flags = {name: bool(row.pop(name)) for name in ("paused", "closed", "started")}
    return SubscriptionRecord(terms=SubscriptionTerms(**terms), quarantined=quarantined, **flags, **row)  # type: ignore[arg-type]


def _lock(path: Path) -> int:
    """An exclusive lock beside the file for as long as the process lives; the kernel drops it with the process."""
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise _unsupported(
            f"The ledger {path} is in use by another target server (process {owner}).",
            "Stop that one, or name another file with --ledger: every server needs its own.",
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


@contextlib.contextmanager
def _in_words(path: Path, *, serving: bool = False) -> Iterator[None]:
    """Turn what SQLite and the operating system say into an error for a person.

    `serving`: runs depend on the file, so what may pass is no reason to end one.
    """
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if serving and name.startswith(_PASSING):
            raise _not_now(path, name, error) from error
        if name.startswith("SQLITE_FULL"):
            raise SlipstreamError(
                f"The disk that holds the ledger {path} is full.",
                reason=Reason.DISK_FULL,
                remedy="Free some space; nothing that was acknowledged is lost.",
            ) from error
        raise _unsupported(
            f"The ledger {path} cannot be used: {error}.",
            "Mend or remove the file, or name another with --ledger: trainers resume from their checkpoints.",
        ) from error
    except OSError as error:
        raise _unsupported(
            f"The ledger {path} cannot be used: {error.strerror}.", "Name a writable file with --ledger."
        ) from error


def _not_now(path: Path, name: str, error: sqlite3.Error) -> SlipstreamError:
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        what = f"Another program holds a lock on the ledger {path} ({error})."
        remedy = f"End it; `fuser {path}` names it, beside this server. Nothing is lost: who waits asks again."
    elif name.startswith("SQLITE_FULL"):
        what = f"The disk that holds the ledger {path} is full."
        remedy = "Free some space there. Nothing is lost: who waits asks again."
    else:
        what = f"The ledger {path} cannot be read or written: {error} ({name})."
        remedy = "Look at its disk and at the quota of the server's user. Nothing is lost: who waits asks again."
    return SlipstreamError(what, reason=Reason.LEDGER_UNWRITABLE, remedy=remedy)


def _unsupported(message: str, remedy: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.ENVIRONMENT_UNSUPPORTED, remedy=remedy)
