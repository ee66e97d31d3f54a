"""Visits target servers, so that runs wait for one that is away, and closes there what deleted runs left open."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sqlalchemy.orm import Session

from control_api.background import BackgroundThread
from control_api.bottleneck import WaitMeter
from control_api.settings import Settings
from control_api.store import subscriptions, targets
from control_api.store.database import Database
from control_api.store.tables import Target
from control_api.target_visit import Errands, Finding, visit
from slipstream.telemetry.logs import log_event

_log = logging.getLogger(__name__)

_AT_ONCE = 8  # targets visited at the same time


@dataclass(frozen=True)
class _Call:
    """A target to visit."""

    name: str
    address: str
    errands: Errands


class TargetProber(BackgroundThread):
    """Visits all targets every `settings.probe_seconds`, and when it is woken."""

    def __init__(self, database: Database, settings: Settings, clock: Callable[[], float]) -> None:
        super().__init__("target-prober", self.probe_all, seconds=settings.probe_seconds)
        self._database = database
        self._settings = settings
        self._clock = clock
        self._meter = WaitMeter()
        self._on_change: list[Callable[[], None]] = []

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` when a target has changed."""
        self._on_change.append(listener)

    def probe_all(self) -> None:
        """Visit every target and store what it said.

        Raises:
            SlipstreamError: the database cannot be used now.
        """
        with self._database.read() as session:
            calls = [_call(session, one) for one in targets.every(session)]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="probe") as pool:
            findings = list(pool.map(self._visit, calls))
        for call, finding in zip(calls, findings, strict=True):
            self._store(call, finding)
        self._meter.keep({name for finding in findings for name in finding.stats})

    def probe(self, name: str, address: str) -> None:
        """Ask one target whether it serves, and store what it said."""
        call = _Call(name, address, Errands())
        self._store(call, self._visit(call))

    def _visit(self, call: _Call) -> Finding:
        return visit(call.address, call.errands, token=self._settings.token, deadline=self._settings.probe_deadline)

    def _store(self, call: _Call, finding: Finding) -> None:
        with self._database.write() as session:
            target = targets.find(session, call.name)
            if target is None or target.address != call.address:  # forgotten, or registered anew, meanwhile
                return
            is_news = (target.status, target.detail) != (finding.status, finding.detail)
            _copy(finding, target)
            target.checked_at = self._clock()
            self._store_errands(session, target, finding)
        if finding.closed:
            log_event(_log, "info", "subscriptions_closed", target=call.name, subscriptions=sorted(finding.closed))
        if is_news:
            log_event(_log, "info", "target_probed", target=call.name, status=finding.status, detail=finding.detail)
            for listener in self._on_change:
                listener()

    def _store_errands(self, session: Session, target: Target, finding: Finding) -> None:
        subscriptions.forget(session, target, finding.closed)
        for run in subscriptions.in_use(session, target) if finding.stats else ():
            if (stats := finding.stats.get(subscriptions.name_of(run))) is not None:
                run.stream_stats = {
                    "target_tokens_per_second": stats.tokens_per_second or None,
                    "target_wait_ratio": self._meter.share(subscriptions.name_of(run), stats),
                    "packs_held_back": stats.is_held_back,
                }


def _call(session: Session, target: Target) -> _Call:
    in_use = [subscriptions.name_of(run) for run in subscriptions.in_use(session, target)]
    return _Call(target.name, target.address, Errands(subscriptions.to_close(session, target), in_use))


def _copy(finding: Finding, target: Target) -> None:
    target.status, target.detail = finding.status, finding.detail
    if finding.status == "REACHABLE":  # a target that is away is still the model it was
        target.model, target.revision = finding.model, finding.revision
        target.fingerprint, target.server_version = finding.fingerprint, finding.server_version
        target.sizes = None if finding.sizes is None else dict(finding.sizes)
