"""⑥ The proof that along the lineage of a run every pack counts exactly once.

A run's lineage is made of incarnations. One that began at step s replaces whatever older ones committed from s on: the
checkpoint it resumed from holds the steps before s and nothing else. So the commits that count are those of an
incarnation below the first step of every later incarnation. One that never committed a step has replaced nothing: a
trainer that was killed before its first step, or that only read held-out answers.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.ledger_store import check_schema

# Incarnations that have committed a step, and the first step that a later one of them replaced; NULL: none was.
_TRAINED = """
WITH trained AS (
    SELECT incarnation, next_step, first_sequence_number, packs_per_step,
        min(next_step) OVER (ORDER BY incarnation ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS replaced_from
    FROM (SELECT DISTINCT incarnation FROM commits WHERE subscription = :name)
    LEFT JOIN (SELECT * FROM incarnations WHERE subscription = :name) USING (incarnation))
"""

# Where the lineage begins: the newest of the incarnations that go back farthest has replaced all before it. It may
# begin late: an older ledger, now lost, knew the steps before.
_BEGINNING = f"""{_TRAINED}
SELECT first_sequence_number + next_step * packs_per_step FROM trained
WHERE next_step IS NOT NULL ORDER BY next_step, incarnation DESC LIMIT 1
"""

# Where a run stands that has committed nothing.
_PRESENT = """
SELECT first_sequence_number + next_step * packs_per_step FROM incarnations
WHERE subscription = :name ORDER BY incarnation DESC LIMIT 1
"""

# For every step: how many commits count, and which packs they trained.
_COUNTED = f"""{_TRAINED}
SELECT c.step, count(*), min(c.first_sequence_number), max(c.last_sequence_number), min(c.quarantined)
FROM commits AS c JOIN trained USING (incarnation)
WHERE c.subscription = :name AND (replaced_from IS NULL OR c.step < replaced_from)
GROUP BY c.step ORDER BY c.step
"""


@dataclass(frozen=True)
class LineageReport:
    """What the ledger knows about a run."""

    run: str
    incarnations: int
    """That have committed a step."""
    steps_committed: int
    """Steps on the lineage."""
    steps_discarded: int
    """Commits that a later incarnation replaced: trained, but not part of what the run has learned."""
    first_sequence_number: int
    next_sequence_number: int
    """One past the last pack that counts."""
    quarantined: tuple[int, ...]
    """Packs inside the range that were left out."""
    missing: tuple[int, ...]
    """Packs inside the range that no commit accounts for."""
    repeated: tuple[int, ...]
    """Packs that more than one commit counts."""

    @property
    def exactly_once(self) -> bool:
        """Every pack from the first to the last counts once."""
        return not self.missing and not self.repeated

    @property
    def packs_counted(self) -> int:
        """Packs from the first to the last that count: neither missing nor quarantined."""
        return self.next_sequence_number - self.first_sequence_number - len(self.missing) - len(self.quarantined)


def lineage_report(ledger: Path, run: str) -> LineageReport:
    """Read the proof of one run from a ledger; works while the server runs.

    Args:
        ledger: the server's SQLite file.
        run: name of the run.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED for a file that is not a ledger; SUBSCRIPTION_UNKNOWN.
    """
    with _reading(ledger) as connection:
        return _report(connection, run)


def lineage_reports(ledger: Path) -> list[LineageReport]:
    """The proofs of all runs that have trained, by name. Raises as `lineage_report`."""
    with _reading(ledger) as connection:
        return [_report(connection, name) for name in _names(connection)]


@contextlib.contextmanager
def _reading(ledger: Path) -> Iterator[sqlite3.Connection]:
    """One transaction: every query sees the same moment of a server that goes on."""
    if not ledger.is_file():
        raise _no_ledger(f"There is no ledger {ledger}.")
    try:
        connection = sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
        try:
            connection.isolation_level = None
            connection.execute("BEGIN")
            check_schema(connection, ledger, create=False)
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise _no_ledger(f"The ledger {ledger} cannot be read: {error}.") from error


def _no_ledger(message: str) -> SlipstreamError:
    remedy = "Name the file that the target server was given with --ledger."
    return SlipstreamError(message, reason=Reason.ENVIRONMENT_UNSUPPORTED, remedy=remedy)


def _names(connection: sqlite3.Connection) -> list[str]:
    found = connection.execute("SELECT DISTINCT subscription FROM commits ORDER BY subscription").fetchall()
    return [name.removeprefix("subscriptions/") for (name,) in found]


def _report(connection: sqlite3.Connection, run: str) -> LineageReport:
    name = {"name": f"subscriptions/{run}"}
    present = connection.execute(_PRESENT, name).fetchone()
    if present is None:
        raise SlipstreamError(
            f"The ledger knows no incarnation of a run {run!r}.",
            reason=Reason.SUBSCRIPTION_UNKNOWN,
            remedy=f"Runs that have trained on this target server: {', '.join(_names(connection)) or 'none'}.",
        )
    first: int = (connection.execute(_BEGINNING, name).fetchone() or present)[0]
    commits, incarnations = connection.execute(
        "SELECT count(*), count(DISTINCT incarnation) FROM commits WHERE subscription = :name", name
    ).fetchone()
    expected, counted = first, 0
    missing: list[int] = []
    repeated: list[int] = []
    quarantined: list[int] = []
    for _, commits_of_step, first_pack, last_pack, skipped in connection.execute(_COUNTED, name):
        counted += commits_of_step
        missing.extend(range(expected, first_pack))
        repeated.extend(range(first_pack, last_pack + 1) if commits_of_step > 1 else range(first_pack, expected))
        quarantined.extend(json.loads(skipped))
        expected = last_pack + 1
    return LineageReport(
        run=run,
        incarnations=incarnations,
        steps_committed=counted,
        steps_discarded=commits - counted,
        first_sequence_number=first,
        next_sequence_number=expected,
        quarantined=tuple(quarantined),
        missing=tuple(missing),
        repeated=tuple(repeated),
    )
