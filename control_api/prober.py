"""Asks target servers whether they can serve, so that no run is given to a trainer for a target that is away."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from control_api.background import BackgroundThread
from control_api.schemas import TargetStatus
from control_api.settings import Settings
from control_api.store import targets
from control_api.store.database import Database
from control_api.store.tables import Target
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event
from slipstream.wire.channel import TargetClient, WaitInterruptedError

_log = logging.getLogger(__name__)

_AT_ONCE = 8  # targets asked at the same time
_STATUS_OF_WAIT: dict[Reason, TargetStatus] = {
    Reason.TARGET_LOADING: "LOADING",
    Reason.TARGET_DRAINING: "DRAINING",
}


@dataclass(frozen=True)
class Finding:
    """What a target said."""

    status: TargetStatus
    detail: str = ""
    model: str | None = None
    revision: str | None = None
    fingerprint: str | None = None
    server_version: str | None = None


def ask(address: str, *, token: str | None, deadline: float) -> Finding:
    """One handshake; waits for at most `deadline` seconds and never tries twice."""
    waits: list[Reason] = []
    stop = threading.Event()

    def give_up(reason: Reason, _seconds: float) -> None:
        waits.append(reason)
        stop.set()

    try:
        client = TargetClient(address, token=token, on_wait=give_up, stop=stop)
    except SlipstreamError as error:
        return Finding("INCOMPATIBLE", str(error))
    too_late = threading.Timer(deadline, client.close)
    too_late.daemon = True
    too_late.start()
    with client:
        try:
            target = client.get_target()
        except WaitInterruptedError:
            return _absent(waits, address, deadline)
        except SlipstreamError as error:
            return Finding("INCOMPATIBLE", str(error))
        finally:
            too_late.cancel()
    return Finding(
        "REACHABLE",
        model=target.model_id,
        revision=target.model_revision or None,
        fingerprint=target.target_fingerprint,
        server_version=target.server_version,
    )


def _absent(waits: list[Reason], address: str, deadline: float) -> Finding:
    if not waits:
        return Finding("UNREACHABLE", f"No answer from {address} within {deadline:g} s.")
    status = _STATUS_OF_WAIT.get(waits[0], "UNREACHABLE")
    words = {"LOADING": "is loading its model.", "DRAINING": "is shutting down."}
    return Finding(status, f"The target server at {address} {words.get(status, 'does not answer.')}")


class TargetProber(BackgroundThread):
    """Asks all targets every `settings.probe_seconds`, and when it is woken."""

    def __init__(self, database: Database, settings: Settings, clock: Callable[[], float]) -> None:
        super().__init__("target-prober", self.probe_all, seconds=settings.probe_seconds)
        self._database = database
        self._settings = settings
        self._clock = clock
        self._on_change: list[Callable[[], None]] = []

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` when a target has changed."""
        self._on_change.append(listener)

    def probe_all(self) -> None:
        """Ask every target and store what it said.

        Raises:
            SlipstreamError: the database cannot be used now.
        """
        with self._database.read() as session:
            addresses = {one.name: one.address for one in targets.every(session)}
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="probe") as pool:
            findings = dict(zip(addresses, pool.map(self._ask, addresses.values()), strict=True))
        for name, finding in findings.items():
            self._store(name, addresses[name], finding)

    def probe(self, name: str, address: str) -> None:
        """Ask one target and store what it said."""
        self._store(name, address, self._ask(address))

    def _ask(self, address: str) -> Finding:
        return ask(address, token=self._settings.token, deadline=self._settings.probe_deadline)

    def _store(self, name: str, address: str, finding: Finding) -> None:
        with self._database.write() as session:
            target = targets.find(session, name)
            if target is None or target.address != address:  # forgotten, or registered anew, meanwhile
                return
            is_news = (target.status, target.detail) != (finding.status, finding.detail)
            _copy(finding, target)
            target.checked_at = self._clock()
        if is_news:
            log_event(_log, "info", "target_probed", target=name, status=finding.status, detail=finding.detail)
            for listener in self._on_change:
                listener()


def _copy(finding: Finding, target: Target) -> None:
    target.status, target.detail = finding.status, finding.detail
    if finding.status == "REACHABLE":  # a target that is away is still the model it was
        target.model, target.revision = finding.model, finding.revision
        target.fingerprint, target.server_version = finding.fingerprint, finding.server_version
