"""Whether the server can be used: loading, serving or draining. Requests ask; health shows it."""

import threading

from grpc_health.v1 import health, health_pb2

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.served_target import ServedTarget

_SERVICES = ("", "slipstream.hidden_states.v1.HiddenStateService", "slipstream.hidden_states.v1.StreamAdminService")


class Readiness:
    """Thread-safe. Health says SERVING only between `serve` and `drain`, while an engine lives."""

    def __init__(self, model: str) -> None:
        """`model`: as given, for the message while it loads."""
        self.health = health.HealthServicer()
        self._model = model
        self._lock = threading.Lock()
        self._served: ServedTarget | None = None
        self._draining = False
        self._working = True
        self._set(health_pb2.HealthCheckResponse.NOT_SERVING)

    def serve(self, served: ServedTarget) -> None:
        """The model is loaded."""
        with self._lock:
            self._served = served
            self._show()

    def set_working(self, working: bool) -> None:
        """Whether anything computes packs now: while all engines are being started again, nothing does."""
        with self._lock:
            self._working = working
            self._show()

    def drain(self) -> None:
        """Refuse new runs from now on."""
        with self._lock:
            self._draining = True
            self._show()

    def target(self) -> ServedTarget:
        """The loaded target; also while draining, when outstanding leases are finished.

        Raises:
            SlipstreamError: TARGET_LOADING.
        """
        with self._lock:
            if self._served is None:
                raise SlipstreamError(
                    f"The target server is loading {self._model}.",
                    reason=Reason.TARGET_LOADING,
                    remedy="Wait; its log shows the progress.",
                )
            return self._served

    def target_for_new_runs(self) -> ServedTarget:
        """The loaded target.

        Raises:
            SlipstreamError: TARGET_LOADING, TARGET_DRAINING.
        """
        with self._lock:
            if self._draining:
                raise SlipstreamError(
                    "The target server is draining: it finishes what is leased, then leaves.",
                    reason=Reason.TARGET_DRAINING,
                    remedy="Wait until it is started again, or use another target server.",
                )
        return self.target()

    def _show(self) -> None:
        serving = self._served is not None and self._working and not self._draining
        status = health_pb2.HealthCheckResponse
        self._set(status.SERVING if serving else status.NOT_SERVING)

    def _set(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        for service in _SERVICES:
            self.health.set(service, status)
